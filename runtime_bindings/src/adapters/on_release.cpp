// What a newer release of a foundation means for the adapters that are loaded above it.

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include <blobstore/reading.h>

#include "adapters/adapter_file.h"
#include "adapters/exchange.h"
#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "adapters/on_cache.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

using OnCache = AdaptersOfCache::OnCache;

/// Whether an adapter was read from a file with these bytes.
bool is_file(const Adapter& adapter, const std::string& path) {
  const PtdFile* const mine = AdapterAccess::impl(adapter).file.get();
  if (mine == nullptr) {
    return false;
  }
  const PtdFile file(path);
  const auto [data, size] = file.bytes();
  return mine->bytes().second == size && std::memcmp(mine->bytes().first, data, size) == 0;
}

/// One commit, step by step. The turn of all caches is held.
class OnRelease {
 public:
  OnRelease(ReleaseCommit& commit, const CacheTensors& tensors)
      : commit_(commit), cache_(*commit.cache), tensors_(tensors), state_(AdaptersOfCache::of(commit.cache)) {}

  void run() {
    learn_own();
    if (commit_.choice == FollowAdapters::Release) {
      plan_exchange();
    }
    const std::vector<OnCache> all = AdaptersOfCache::all_above(cache_);
    for (const Change& change : commit_.changes) {
      if (!all.empty()) { // otherwise nobody asks
        replaced_.emplace(change.key, digest(change.data, change.size));
      }
    }
    for (const OnCache& one : all) {
      check(one);
    }
    check_merged();
    keep_own();
    const std::vector<NewBlob> blobs = exchanged();
    if (!commit_.reasons.empty()) {
      commit_.adapters.clear();
      return;
    }
    for (const NewBlob& blob : blobs) {
      commit_.changes.emplace_back(blob.key, blob.bytes.data, blob.bytes.nbytes);
    }
    if (!commit_.changes.empty()) {
      commit_.generation = commit_.cache->update(commit_.changes);
    }
    if (next_ != nullptr) {
      next_->after = digests_of_adapters(tensors_, *known_, *next_);
      state_->set_loaded(next_);
    }
  }

 private:
  /// What programs on the cache have for adapters, and what of it is not the release's.
  void learn_own() {
    const std::vector<NamedTensor> all = named_tensors(tensors_.updates().index());
    if (std::any_of(all.begin(), all.end(), [](const NamedTensor& one) { return is_lora(one.name); })) {
      known_ = state_->known(tensors_);
    }
    loaded_ = state_->loaded();
    const BlobCache::Reading reading(cache_);
    for (const std::string& key : cache_.dirty()) {
      const Blob& blob = cache_.at(key);
      const auto known = commit_.held.find(key);
      if (known == commit_.held.end() || known->second.size != blob.size ||
          std::memcmp(known->second.data, blob.data, blob.size) != 0) {
        own_.insert(key);
      }
    }
  }

  /// Read the newer release's files for those of its adapters that are loaded.
  void plan_exchange() {
    if (known_ == nullptr || loaded_ == nullptr || !changed_since(cache_, loaded_->after).empty()) {
      return;
    }
    auto next = std::make_shared<LoadedAdapters>(*loaded_);
    for (ScaledAdapter& one : next->adapters) {
      const auto named = std::find_if(commit_.before.begin(), commit_.before.end(), [&](const auto& file) {
        return is_file(*one.adapter, file.second);
      });
      const auto newer = named == commit_.before.end() ? commit_.after.end() : commit_.after.find(named->first);
      if (newer == commit_.after.end() || is_file(*one.adapter, newer->second)) {
        continue; // it stays, if it fits
      }
      const std::shared_ptr<const Adapter> adapter = Adapter::read(newer->second);
      raise_first(adapter->problems());
      if (one.adapter->scale() && adapter->scale() && *one.adapter->scale() != 0) {
        one.factor *= *adapter->scale() / *one.adapter->scale();
      }
      one.adapter = adapter;
      commit_.adapters.push_back(newer->first);
    }
    if (!commit_.adapters.empty()) {
      next_ = std::move(next);
    }
  }

  /// Note the adapters on a cache that do not fit.
  void check(const OnCache& one) {
    const bool is_mine = one.cache.get() == &cache_;
    const auto loaded = is_mine && next_ != nullptr ? next_ : one.state->loaded();
    const BlobCache::Reading reading(*one.cache);
    std::map<std::string, Digest> replaced;
    for (const auto& [key, digest] : replaced_) {
      if (one.cache->find(key) == cache_.find(key)) { // otherwise a cache above has the key, too
        replaced.emplace(key, digest);
      }
    }
    const std::set<std::string> now = foundations_of(*one.cache, *one.known, digests_now(*one.cache));
    const std::set<std::string> then = foundations_of(*one.cache, *one.known, digests_now(*one.cache, replaced));
    if (now == then) {
      return;
    }
    if (const auto requested = one.state->requested()) {
      check_requested(*requested, then);
    } else if (has_adapter(one, is_mine)) {
      check_loaded(one, loaded.get(), then);
    }
  }

  /// They are compared again before they are used.
  void check_requested(const AdaptersOfCache::Requested& requested, const std::set<std::string>& foundations) {
    for (const auto& [name, adapter] : requested) {
      if (adapter->foundation() && foundations.count(*adapter->foundation()) == 0) {
        add_unfit(name);
      }
    }
  }

  /// @param loaded null if it is not known what the cache has.
  void check_loaded(const OnCache& one, const LoadedAdapters* loaded, const std::set<std::string>& then) {
    if (loaded == nullptr || (next_.get() != loaded && !changed_since(*one.cache, loaded->after).empty())) {
      refuse(one.cache->name(), format("the adapter in {} was trained or changed there", one.cache->name()));
      return;
    }
    for (size_t i = 0; i < loaded->adapters.size(); ++i) {
      const Adapter& adapter = *loaded->adapters[i].adapter;
      const bool is_off = loaded->strengths[i] == 0 && adapter.tensors().size() == 2 * adapter.pairs().size();
      if (is_off) {
        continue;
      }
      if (!adapter.foundation()) {
        refuse(adapter.path(), format("the adapter {} does not record its foundation", adapter.path()));
      } else if (then.count(*adapter.foundation()) == 0) {
        refuse(
            adapter.path(),
            format(
                "the adapter {} was made for foundation {}, {} will have {}",
                adapter.path(),
                *adapter.foundation(),
                one.cache->name(),
                joined(then, " or ")));
      }
    }
  }

  /// What was added to the weights before was made for them, and an undo would bring them back.
  void check_merged() {
    const bool moves = std::any_of(
        commit_.changes.begin(), commit_.changes.end(), [](const Change& change) { return counts(change.key); });
    const BlobCache::Reading reading(cache_);
    const std::vector<std::string> keys = moves ? state_->merged_now(cache_) : std::vector<std::string>();
    if (!keys.empty()) {
      commit_.reasons.push_back(format("an adapter is merged into {}; undo that before", quoted_names(keys)));
    }
  }

  /// Whether a cache has other tensors of adapters than its files, or than the release for them.
  bool has_adapter(const OnCache& one, bool is_mine) const {
    for (const NamedTensor& tensor : one.known->lora) {
      for (const std::string& key : tensor.keys) {
        if (is_mine ? own_.count(key) != 0 : one.cache->owns(key) && one.cache->differs_from_file(key)) {
          return true;
        }
      }
    }
    return false;
  }

  void add_unfit(const std::string& name) {
    if (std::find(commit_.unfit.begin(), commit_.unfit.end(), name) == commit_.unfit.end()) {
      commit_.unfit.push_back(name);
    }
  }
  void refuse(const std::string& name, std::string reason) {
    add_unfit(name);
    commit_.reasons.push_back(std::move(reason));
  }

  /// Leave out blobs of adapters that stay, and those that come from the release's own.
  void keep_own() {
    std::set<std::string> stay;
    if (known_ != nullptr) {
      for (const NamedTensor& tensor : known_->lora) {
        stay.insert(tensor.keys.begin(), tensor.keys.end());
      }
    }
    if (loaded_ != nullptr) {
      for (const auto& [key, digest] : loaded_->after) {
        stay.insert(key);
      }
    }
    auto& changes = commit_.changes;
    changes.erase(
        std::remove_if(
            changes.begin(),
            changes.end(),
            [&](const Change& change) { return stay.count(change.key) != 0 && own_.count(change.key) != 0; }),
        changes.end());
  }

  /// The blobs of the release's own adapters.
  std::vector<NewBlob> exchanged() {
    if (next_ == nullptr) {
      return {};
    }
    try {
      const std::vector<Given> given = all_given(values_of(tensors_, *known_, *next_, /*halves=*/false));
      tensors_.check_reach(given, /*whole=*/false);
      return tensors_.updates().changes(given, /*finite=*/true).blobs;
    } catch (const Error& error) {
      commit_.reasons.emplace_back(error.what());
      return {};
    }
  }

  ReleaseCommit& commit_;
  const BlobCache& cache_;
  const CacheTensors& tensors_;
  const std::shared_ptr<AdaptersOfCache> state_;
  std::shared_ptr<const KnownOfCache> known_; // null if programs have no adapter
  std::shared_ptr<const LoadedAdapters> loaded_;
  std::shared_ptr<LoadedAdapters> next_; // what is loaded with this commit; null if nothing else
  std::set<std::string> own_; // keys whose bytes are not the release's
  std::map<std::string, Digest> replaced_;
};

} // namespace

void commit_release(ReleaseCommit& commit) {
  const CacheTensors tensors(commit.cache);
  const auto alone = AdaptersOfCache::of(commit.cache)->take_turn_of_all(*commit.cache);
  OnRelease(commit, tensors).run();
}

} // namespace blobstore::internal
