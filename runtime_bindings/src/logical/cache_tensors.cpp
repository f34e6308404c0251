#include "logical/cache_tensors.h"

#include <algorithm>
#include <unordered_map>

#include "cache/mapped_cache.h"
#include "logical/numbers.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// A strict update clips at most one in so many numbers of a tensor.
constexpr uint64_t kMostClipped = 1000;

/// A cache that is open.
const BlobCache& opened(const std::shared_ptr<BlobCache>& cache) {
  cache->check_open();
  return *cache;
}

std::vector<Change> changes_of(const std::vector<NewBlob>& blobs) {
  std::vector<Change> changes;
  for (const NewBlob& blob : blobs) {
    changes.push_back({blob.key, blob.bytes.data, blob.bytes.nbytes, blob.has_layout ? &blob.layout : nullptr});
  }
  return changes;
}

/// @throws Error Update: more numbers would be clipped than a strict update takes.
void check_clipped(const BlobCache& cache, const std::vector<Quantized>& quantized) {
  std::string text;
  for (const Quantized& one : quantized) {
    if (one.clipped > one.numbers / kMostClipped) {
      text += format("{}{} of {} numbers of '{}'", text.empty() ? "" : ", ", one.clipped, one.numbers, one.name);
    }
  }
  if (!text.empty()) {
    throw_error(
        ErrorKind::Update,
        "{}: nothing was changed, because {} would be clipped: they lie outside of what the scales can express that "
        "the program was lowered with, and these scales cannot change; lower the changed model, or update without "
        "strict",
        cache.name(),
        text);
  }
}

} // namespace

CacheTensors::CacheTensors(std::shared_ptr<BlobCache> cache)
    : cache_(std::move(cache)), source_(opened(cache_)), updates_(source_) {}

Updated CacheTensors::update(const std::vector<Given>& given, bool finite, bool strict) const {
  cache_->check_open();
  check_effect(given, /*every=*/false);
  return commit(given, finite, strict);
}

Updated CacheTensors::commit(const std::vector<Given>& given, bool finite, bool strict) const {
  for (;;) { // again if another commit changed scales while numbers were quantized with them
    Changes changes = updates_.changes(given, finite);
    if (strict) {
      check_clipped(*cache_, changes.quantized);
    }
    auto& cache = mapped(*cache_);
    if (const auto generation = cache.update_if(changes_of(changes.blobs), changes_of(changes.used))) {
      return {*generation, std::move(changes.quantized)};
    }
  }
}

Updated CacheTensors::update_state_dict(const std::vector<Given>& given, bool strict, bool finite) const {
  cache_->check_open();
  if (strict) {
    check_reach(given, true);
  }
  const std::vector<Given> chosen = choose(given, strict);
  check_effect(chosen, /*every=*/true);
  return commit(chosen, finite, strict);
}

std::vector<Given> CacheTensors::choose(const std::vector<Given>& given, bool strict) const {
  std::vector<Entry> entries;
  std::unordered_map<std::string_view, const Given*> by_name;
  for (const Given& one : given) {
    entries.push_back({one.name, is_floating(one.value.scalar_type)});
    by_name.emplace(one.name, &one);
  }
  std::vector<Given> chosen;
  for (const std::string_view name : choose(entries, strict)) {
    chosen.push_back(*by_name.at(name));
  }
  return chosen;
}

void CacheTensors::check_reach(const std::vector<Given>& tensors, bool whole) const {
  std::vector<Shaped> shapes;
  for (const Given& one : tensors) {
    shapes.push_back({one.name, one.value.scalar_type, one.value.sizes});
  }
  check_reach(shapes, whole);
}

Names CacheTensors::choose(const std::vector<Entry>& entries, bool strict) const {
  const std::optional<NamesInUse> in_use =
      strict ? reach_.in_use(*cache_, updates_.index(), /*serving=*/false) : std::nullopt;
  Names chosen = updates_.choose(entries, strict, in_use ? &*in_use : nullptr);
  if (!strict && !chosen.empty() && without_takers(chosen).size() == chosen.size()) {
    throw updates_.mismatch(chosen);
  }
  return chosen;
}

Names CacheTensors::without_takers(const Names& names) const {
  const Index& index = updates_.index();
  const std::optional<NamesInUse> in_use = reach_.in_use(*cache_, index, /*serving=*/true);
  Names found;
  for (const std::string_view name : names) {
    const Tensor* tensor = index.find(name);
    bool is_taken = tensor != nullptr && !tensor->made_into.empty();
    if (!is_taken && in_use) {
      is_taken = in_use->count(std::string(name)) != 0;
    } else if (!is_taken) {
      const Names similar = updates_.similar(name);
      is_taken = tensor != nullptr || std::none_of(similar.begin(), similar.end(), [&](std::string_view other) {
                   return index.find(other) != nullptr;
                 });
    }
    if (!is_taken) {
      found.push_back(name);
    }
  }
  return found;
}

void CacheTensors::check_effect(const std::vector<Given>& given, bool every) const {
  std::vector<std::string_view> names;
  for (const Given& one : given) {
    names.push_back(one.name);
  }
  std::vector<std::string> problems;
  const size_t found = reach_.without_effect(*cache_, updates_.index(), names, problems).size();
  if (!every || found == names.size()) {
    refuse(problems);
  }
}

void CacheTensors::check_reach(const std::vector<Shaped>& tensors, bool whole) const {
  refuse(reach_.out_of_reach(*cache_, updates_.index(), tensors, whole));
}

void CacheTensors::refuse(const std::vector<std::string>& problems) const {
  if (problems.empty()) {
    return;
  }
  throw_error(
      ErrorKind::Update,
      "{}: nothing was changed, because some weights cannot follow: {}",
      cache_->name(),
      joined(problems, "; "));
}

} // namespace blobstore::internal
