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

  std::shared_ptr<AdaptersOfCache> find(const std::shared_ptr<const BlobCache>& cache) {
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

  std::vector<AdaptersOfCache::OnCache> all_above(const BlobCache& cache) {
    std::vector<std::shared_ptr<const BlobCache>> caches; // the last holder of one frees it without the mutex
    std::vector<AdaptersOfCache::OnCache> found;
    const std::lock_guard<std::mutex> guard(mutex);
    for (const auto& [id, entry] : entries_) {
      const auto& one = caches.emplace_back(entry.cache.lock());
      const BlobCache* below = one.get();
      while (below != nullptr && below != &cache) {
        below = below->base().get();
      }
      if (below != nullptr && entry.state->known_) {
        found.push_back({one, entry.state, entry.state->known_});
      }
    }
    return found;
  }

  std::mutex mutex; // guards the entries, and the pointers in their states

 private:
  struct Entry {
    std::weak_ptr<const BlobCache> cache;
    std::shared_ptr<AdaptersOfCache> state;
  };

  AllCaches() {
    commit_release_under_adapters = commit_release;
    enter();
  }
  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override {
    renew(mutex);
    for (auto& [id, entry] : entries_) {
      renew(entry.state->turn_);
      entry.state->release_.renew();
    }
  }

  std::map<uint64_t, Entry> entries_; // by the cache's id
};

namespace {

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

using Files = std::vector<std::unique_ptr<PtdFile>>;

/// The keys that count of each file that a file was made of, in order, if adapters can be made for it.
std::vector<std::vector<std::string>> foundations_in(const PtdFile& file) {
  const Index index(file);
  std::set<std::string> base; // the keys of tensors that are not LoRA's
  for (NamedTensor& tensor : named_tensors(index)) {
    if (!is_lora(tensor.name)) {
      base.insert(tensor.keys.begin(), tensor.keys.end());
    }
  }
  std::vector<std::vector<std::string>> found;
  for (const std::vector<size_t>& positions : files_in(file)) {
    std::vector<std::string> keys;
    bool any = false;
    for (const size_t position : positions) {
      const std::string& key = file.entry(position).key;
      any = any || base.count(key) != 0;
      if (counts(key)) {
        keys.push_back(key);
      }
    }
    if (any) {
      std::sort(keys.begin(), keys.end());
      found.push_back(std::move(keys));
    }
  }
  return found;
}

void learn_foundations(const Files& files, KnownOfCache& known) {
  std::set<std::string> all;
  for (const auto& file : files) {
    for (std::vector<std::string>& keys : foundations_in(*file)) {
      known.foundations.push_back(std::move(keys));
    }
    for (size_t i = 0; i < file->size(); ++i) {
      if (counts(file->key(i))) {
        all.emplace(file->key(i));
      }
    }
  }
  if (!known.foundations.empty()) {
    known.foundations.emplace_back(all.begin(), all.end());
    return;
  }
  for (const auto& file : files) { // a program may contain its foundation; then only the file of its adapter names it
    const auto recorded = file->metadata().find(kFoundationKey);
    if (recorded != file->metadata().end()) {
      known.recorded.insert(recorded->second);
    }
  }
}

/// A digest as caches give it.
std::optional<Digest> as_digest(const std::optional<std::string>& bytes) {
  if (!bytes) {
    return std::nullopt;
  }
  Digest found{};
  std::copy(bytes->begin(), bytes->end(), found.begin());
  return found;
}

[[noreturn]] void throw_other_foundation(
    const Adapter& adapter, const std::string& where, const std::set<std::string>& foundations) {
  throw_error_in(
      ErrorKind::Adapter,
      adapter.path(),
      "made for foundation {}, {} has {}",
      *adapter.foundation(),
      where,
      foundations.empty() ? "none" : joined(foundations, " or "));
}

void check_records_foundation(const Adapter& adapter) {
  if (!adapter.foundation()) {
    throw_error_in(
        ErrorKind::Adapter,
        adapter.path(),
        "the file does not record the foundation that it was made for; bind_adapter() adds it");
  }
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
  learn_foundations(files, known);
  known.head_dim = rotary_head_dim(files);
  for (const NamedTensor& tensor : named_tensors(tensors.updates().index())) {
    if (is_lora(tensor.name)) {
      known.lora.push_back(tensor);
    }
  }
  return known;
}

} // namespace

std::optional<int64_t> rotary_head_dim(const std::vector<std::unique_ptr<PtdFile>>& files) {
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

std::shared_ptr<AdaptersOfCache> AdaptersOfCache::of(const std::shared_ptr<const BlobCache>& cache) {
  return AllCaches::get().find(cache);
}

AdaptersOfCache::Turn AdaptersOfCache::take_turn(const BlobCache& cache) {
  for (const BlobCache* one = &cache; one != nullptr; one = one->base().get()) {
    if (ThreadReadings::any(*one)) {
      throw_error_in(
          ErrorKind::Unsupported, one->name(), "this thread is reading the cache, so it cannot change it now");
    }
  }
  Turn turn{std::unique_lock<std::mutex>(turn_), {}};
  for (const BlobCache* one = cache.base().get(); one != nullptr; one = one->base().get()) {
    auto state = of(one->shared_from_this());
    std::shared_lock<FairLock> shared(state->release_);
    turn.of_bases.emplace_back(std::move(state), std::move(shared));
  }
  return turn;
}

std::pair<AdaptersOfCache::Turn, std::unique_lock<FairLock>> AdaptersOfCache::take_turn_of_all(const BlobCache& cache) {
  Turn turn = take_turn(cache);
  return {std::move(turn), std::unique_lock<FairLock>(release_)};
}

std::vector<AdaptersOfCache::OnCache> AdaptersOfCache::all_above(const BlobCache& cache) {
  return AllCaches::get().all_above(cache);
}

std::shared_ptr<const AdaptersOfCache::Requested> AdaptersOfCache::requested() const {
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  return requested_;
}

void AdaptersOfCache::set_requested(std::shared_ptr<const Requested> requested) {
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  requested_.swap(requested);
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

Digest AdaptersOfCache::digest_as_is(const BlobCache& cache, const Blob& blob) {
  if (!cache.differs_from_file(blob.key)) {
    if (const auto of_file = as_digest(cache.file_digest(blob.key))) {
      return *of_file;
    }
  }
  const uint64_t version = cache.version(blob.key);
  {
    const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
    const auto known = digests_.find(blob.key);
    if (known != digests_.end() && known->second.first == version) {
      return known->second.second;
    }
  }
  const Digest found = digest(blob.data, blob.size);
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  digests_[blob.key] = {version, found};
  return found;
}

Digest AdaptersOfCache::digest_now(const BlobCache& cache, const Blob& blob) {
  const Digest found = digest_as_is(cache, blob);
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  const auto merged = merged_.find({blob.key, found});
  return merged == merged_.end() ? found : merged->second;
}

std::vector<std::string> AdaptersOfCache::merged_now(const BlobCache& cache) {
  std::set<std::string> keys;
  {
    const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
    for (const auto& [merged, before] : merged_) {
      keys.insert(merged.first);
    }
  }
  std::vector<std::string> found;
  for (const std::string& key : keys) {
    const Blob& blob = cache.at(key);
    if (digest_now(cache, blob) != digest_as_is(cache, blob)) {
      found.push_back(key);
    }
  }
  return found;
}

bool AdaptersOfCache::add_merged(const std::string& key, const Digest& before, const Digest& after) {
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  return merged_.emplace(std::make_pair(key, after), before).second;
}

void AdaptersOfCache::remove_merged(const std::string& key, const Digest& after) {
  const std::lock_guard<std::mutex> guard(AllCaches::get().mutex);
  merged_.erase({key, after});
}

std::set<std::string> foundations_of(const BlobCache& cache, const KnownOfCache& known, const DigestOf& digest_of) {
  std::set<std::string> found = known.recorded;
  for (const std::vector<std::string>& keys : known.foundations) {
    Fingerprint made;
    for (const std::string& key : keys) {
      const Blob& blob = cache.at(key);
      made.add(key, blob.layout, blob.size, digest_of(blob));
    }
    found.insert(made.text());
  }
  return found;
}

DigestOf digests_now(const BlobCache& cache, std::map<std::string, Digest> replaced) {
  std::vector<std::pair<const BlobCache*, std::shared_ptr<AdaptersOfCache>>> owners;
  for (const BlobCache* one = &cache; one != nullptr; one = one->base().get()) {
    owners.emplace_back(one, AdaptersOfCache::of(one->shared_from_this()));
  }
  return [owners = std::move(owners), replaced = std::move(replaced)](const Blob& blob) {
    const auto other = replaced.find(blob.key);
    if (other != replaced.end()) {
      return other->second;
    }
    const auto owner =
        std::find_if(owners.begin(), owners.end(), [&](const auto& one) { return one.first->owns(blob.key); });
    return owner->second->digest_now(*owner->first, blob);
  };
}

void check_foundation(
    const CacheTensors& tensors,
    const KnownOfCache& known,
    const Adapter& adapter,
    const std::map<std::string, Digest>& replaced) {
  check_records_foundation(adapter);
  const BlobCache& cache = *tensors.cache();
  const BlobCache::Reading reading(cache);
  const DigestOf now = digests_now(cache, replaced);
  const std::set<std::string> foundations = foundations_of(cache, known, now);
  if (foundations.count(*adapter.foundation()) != 0) {
    return;
  }
  std::set<std::string> own;
  for (const NamedTensor& tensor : adapter.tensors()) {
    for (std::string& key : keys_of(tensors, tensor.name)) {
      own.insert(std::move(key));
    }
  }
  const DigestOf without_own = [&](const Blob& blob) {
    const auto of_file = own.count(blob.key) != 0 ? as_digest(cache.file_digest(blob.key)) : std::nullopt;
    return of_file ? *of_file : now(blob);
  };
  if (foundations_of(cache, known, without_own).count(*adapter.foundation()) == 0) {
    const std::string where = replaced.empty() ? cache.name() : format("{} with the new weights", cache.name());
    throw_other_foundation(adapter, where, foundations);
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
  const Index& index = tensors.updates().index();
  const Tensor* tensor = index.find(name);
  if (tensor == nullptr) {
    return keys;
  }
  keys.insert(keys.end(), tensor->names.begin(), tensor->names.end());
  const std::vector<std::string> changed = index.keys_changed_with(*tensor);
  keys.insert(keys.end(), changed.begin(), changed.end());
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
