#include "adapters/on_cache.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <blobstore/reading.h>

#include "adapters/adapter_file.h"
#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "cache/opened_files.h"
#include "cache/thread_readings.h"
#include "logical/numbers.h"
#include "logical/reorder.h"
#include "os/fork.h"
#include "os/text.h"

namespace blobstore::internal {

/// The state of every cache that adapters were used on.
class AllCaches final : private ForkAware {
 public:
  /// Never destroyed: caches may outlive static destruction.
  static AllCaches& get() {
    static auto* all = new AllCaches;
    return *all;
  }

  std::shared_ptr<AdaptersOfCache> find(const std::shared_ptr<BlobCache>& cache) {
    const std::lock_guard<std::mutex> guard(mutex);
    for (auto at = entries_.begin(); at != entries_.end();) {
      at = at->second.cache.expired() ? entries_.erase(at) : std::next(at);
    }
    Entry& entry = entries_[cache->id()];
    if (!entry.state) {
      entry = {cache, std::make_shared<AdaptersOfCache>()};
    }
    return entry.state;
  }

  std::mutex mutex; // guards the entries, and the pointers in their states

 private:
  struct Entry {
    std::weak_ptr<const BlobCache> cache;
    std::shared_ptr<AdaptersOfCache> state;
  };

  AllCaches() { enter(); }
  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override {
    renew(mutex);
    for (auto& [id, entry] : entries_) {
      renew(entry.state->turn_);
    }
  }

  std::map<uint64_t, Entry> entries_; // by the cache's id
};

namespace {

/// Whether adapters can be made for what these files hold.
bool is_foundation(const BlobSource& blobs) {
  const Index index(blobs);
  const std::vector<NamedTensor> tensors = named_tensors(index);
  return std::any_of(tensors.begin(), tensors.end(), [](const NamedTensor& one) { return !is_lora(one.name); });
}

/// The files of a cache and its bases.
std::vector<std::unique_ptr<PtdFile>> all_files(const BlobCache& cache) {
  std::vector<std::unique_ptr<PtdFile>> files;
  for (const BlobCache* one = &cache; one != nullptr; one = one->base().get()) {
    for (auto& file : opened_files(*one)) {
      files.push_back(std::move(file));
    }
  }
  return files;
}

/// All files together; empty if two of them contradict each other.
std::optional<Foundation> together(const std::vector<const PtdFile*>& files) {
  try {
    return Foundation(files);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::KeyConflict) {
      throw;
    }
    return std::nullopt; // a cache on top of its base may have other contents
  }
}

using Files = std::vector<std::unique_ptr<PtdFile>>;

/// The fingerprints that an adapter for these files may record.
/// @param replaced as for `Foundation::fingerprint`.
std::set<std::string> foundations_of(const Files& files, const std::map<std::string, Digest>& replaced) {
  std::set<std::string> found;
  for (const auto& file : files) {
    if (const Foundation alone({file.get()}); is_foundation(alone)) {
      found.insert(alone.fingerprint(replaced));
    }
  }
  if (files.size() > 1) {
    if (const auto all = together(pointers(files)); all && is_foundation(*all)) {
      found.insert(all->fingerprint(replaced));
    }
  }
  if (found.empty()) { // a program may contain its foundation; then only the file of its adapter names it
    for (const auto& file : files) {
      const auto recorded = file->metadata().find(kFoundationKey);
      if (recorded != file->metadata().end()) {
        found.insert(recorded->second);
      }
    }
  }
  return found;
}

/// The digests of the blobs that a cache has, itself or from its bases, and that differ from their files. The caller
/// holds a Reading.
/// @param changed what is known already: these keys are not read.
std::map<std::string, Digest> changed_digests(const BlobCache& cache, std::map<std::string, Digest> changed = {}) {
  for (const BlobCache* one = &cache; one != nullptr; one = one->base().get()) {
    for (const std::string& key : one->dirty()) {
      const Blob& blob = one->at(key);
      if (changed.count(key) == 0 &&
          &cache.at(key) == &blob) { // otherwise a cache above has the key, too, and programs take that one
        changed.emplace(key, digest(blob.data, blob.size));
      }
    }
  }
  return changed;
}

[[noreturn]] void throw_other_foundation(
    const Adapter& adapter, const std::string& where, const std::set<std::string>& foundations) {
  std::string have;
  for (const std::string& foundation : foundations) {
    have += (have.empty() ? "" : " or ") + foundation;
  }
  throw_error_in(
      ErrorKind::Adapter,
      adapter.path(),
      "made for foundation {}, {} has {}",
      *adapter.foundation(),
      where,
      have.empty() ? "none" : have);
}

void check_records_foundation(const Adapter& adapter) {
  if (!adapter.foundation()) {
    throw_error_in(
        ErrorKind::Adapter,
        adapter.path(),
        "the file does not record the foundation that it was made for; bind_adapter() adds it");
  }
}

/// What the tables of the rotary embedding in these files say, as `KnownOfCache::head_dim`. Hugging Face's have the
/// cosines of all elements of a head, twice the same half. Llama's have one for each two neighbours.
std::optional<int64_t> rotary_head_dim(const Files& files) {
  std::set<int64_t> found;
  for (const auto& file : files) {
    for (size_t i = 0; i < file->size(); ++i) {
      const PtdEntry& entry = file->entry(i);
      const bool is_table = entry.key == "freqs_cos" || ends_with(entry.key, ".freqs_cos");
      if (!is_table || !entry.layout || entry.layout->scalar_type != kFloat || entry.layout->sizes.size() != 2) {
        continue;
      }
      const auto rows = static_cast<size_t>(entry.layout->sizes[0]);
      const auto columns = static_cast<size_t>(entry.layout->sizes[1]);
      if (rows < 2 || columns < 2) { // one position, or one pair of elements, looks the same in both layouts
        continue;
      }
      const size_t half = columns / 2 * sizeof(float);
      const uint8_t* row = file->blob(i).data;
      bool twice = columns % 2 == 0;
      for (size_t j = 0; j < rows && twice; ++j, row += 2 * half) {
        twice = std::memcmp(row, row + half, half) == 0;
      }
      found.insert(twice ? 0 : 2 * static_cast<int64_t>(columns));
    }
  }
  return found.size() == 1 ? std::optional<int64_t>(*found.begin()) : std::nullopt;
}

KnownOfCache learn(const CacheTensors& tensors) {
  const BlobCache& cache = *tensors.cache();
  const BlobCache::Reading reading(cache);
  KnownOfCache known;
  const Files files = all_files(cache);
  for (const auto& file : files) {
    if (const auto scale = recorded_scale(*file)) {
      known.scales.insert(*scale);
    }
  }
  known.foundations = foundations_of(files, {});
  known.head_dim = rotary_head_dim(files);
  for (const NamedTensor& tensor : named_tensors(tensors.updates().index())) {
    if (is_lora(tensor.name)) {
      known.lora.push_back(tensor);
    }
  }
  return known;
}

} // namespace

std::shared_ptr<AdaptersOfCache> AdaptersOfCache::of(const std::shared_ptr<BlobCache>& cache) {
  return AllCaches::get().find(cache);
}

std::unique_lock<std::mutex> AdaptersOfCache::take_turn(const BlobCache& cache) {
  if (ThreadReadings::any(cache)) {
    throw_error_in(
        ErrorKind::Unsupported, cache.name(), "this thread is reading the cache, so it cannot change it now");
  }
  return std::unique_lock<std::mutex>(turn_);
}

std::shared_ptr<const KnownOfCache> AdaptersOfCache::known(const CacheTensors& tensors) {
  if (!known_) {
    auto made = std::make_shared<const KnownOfCache>(learn(tensors));
    const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
    known_ = std::move(made);
  }
  return known_;
}

std::shared_ptr<const LoadedAdapters> AdaptersOfCache::loaded() const {
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  return loaded_;
}

void AdaptersOfCache::set_loaded(std::shared_ptr<const LoadedAdapters> loaded) {
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  loaded_.swap(loaded);
}

void check_foundation(const BlobCache& cache, const KnownOfCache& known, const Adapter& adapter) {
  check_records_foundation(adapter);
  if (known.foundations.count(*adapter.foundation()) != 0) {
    return;
  }
  const BlobCache::Reading reading(cache);
  const std::map<std::string, Digest> changed = changed_digests(cache); // a fine-tune has adapters of its own
  if (changed.empty() || foundations_of(all_files(cache), changed).count(*adapter.foundation()) == 0) {
    throw_other_foundation(adapter, cache.name(), known.foundations);
  }
}

void check_foundation_with(
    const BlobCache& cache, const std::map<std::string, Digest>& replaced, const Adapter& adapter) {
  check_records_foundation(adapter);
  const BlobCache::Reading reading(cache);
  const std::set<std::string> foundations = foundations_of(all_files(cache), changed_digests(cache, replaced));
  if (foundations.count(*adapter.foundation()) == 0) {
    throw_other_foundation(adapter, format("{} with the new weights", cache.name()), foundations);
  }
}

std::vector<Given> all_given(const NamedViews& values) {
  std::vector<Given> given;
  for (const auto& [name, value] : values) {
    given.push_back({name, value, row_major(value.sizes.size()), {}});
  }
  return given;
}

uint64_t commit(const CacheTensors& tensors, const NamedViews& values) {
  const std::vector<Given> given = all_given(values);
  tensors.check_reach(given, /*whole=*/false);
  return tensors.update(given, /*finite=*/true);
}

std::vector<std::string> keys_of(const CacheTensors& tensors, const std::string& name) {
  std::vector<std::string> keys{name};
  if (const Tensor* tensor = tensors.updates().index().find(name)) {
    keys.insert(keys.end(), tensor->names.begin(), tensor->names.end());
    for (const Record* record : tensor->made_into) {
      keys.push_back(record->key);
    }
  }
  return keys;
}

std::map<std::string, Digest> digests_of(const BlobCache& cache, const std::vector<std::string>& keys) {
  const BlobCache::Reading reading(cache);
  std::map<std::string, Digest> found;
  for (const std::string& key : keys) {
    if (const Blob* blob = cache.find(key)) {
      found.emplace(key, digest(blob->data, blob->size));
    }
  }
  return found;
}

std::vector<std::string> changed_since(const BlobCache& cache, const std::map<std::string, Digest>& digests) {
  const BlobCache::Reading reading(cache);
  std::vector<std::string> changed;
  for (const auto& [key, found] : digests) {
    const Blob& blob = cache.at(key);
    if (digest(blob.data, blob.size) != found) {
      changed.push_back(key);
    }
  }
  return changed;
}

} // namespace blobstore::internal
