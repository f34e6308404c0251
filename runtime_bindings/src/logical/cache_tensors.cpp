#include "logical/cache_tensors.h"

#include <unordered_map>

#include "cache/mapped_cache.h"
#include "logical/numbers.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

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

} // namespace

CacheTensors::CacheTensors(std::shared_ptr<BlobCache> cache)
    : cache_(std::move(cache)), source_(opened(cache_)), updates_(source_) {}

uint64_t CacheTensors::update(const std::vector<Given>& given, bool finite) const {
  cache_->check_open();
  check_effect(given, /*every=*/false);
  return commit(given, finite);
}

uint64_t CacheTensors::commit(const std::vector<Given>& given, bool finite) const {
  for (;;) { // again if another commit changed scales while numbers were quantized with them
    std::vector<NewBlob> used;
    const std::vector<NewBlob> blobs = updates_.changes(given, finite, used);
    auto& cache = mapped(*cache_);
    if (const auto generation = cache.update_if(changes_of(blobs), changes_of(used))) {
      return *generation;
    }
  }
}

uint64_t CacheTensors::update_state_dict(const std::vector<Given>& given, bool strict, bool finite) const {
  cache_->check_open();
  if (strict) {
    check_reach(given, true);
  }
  const std::vector<Given> chosen = choose(given, strict);
  check_effect(chosen, /*every=*/true);
  return commit(chosen, finite);
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
  const std::optional<NamesInUse> in_use = strict ? reach_.in_use(*cache_, updates_.index()) : std::nullopt;
  return updates_.choose(entries, strict, in_use ? &*in_use : nullptr);
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
  std::string text;
  for (const std::string& problem : problems) {
    text += (text.empty() ? "" : "; ") + problem;
  }
  throw_error(
      ErrorKind::Update, "{}: nothing was changed, because some weights cannot follow: {}", cache_->name(), text);
}

} // namespace blobstore::internal
