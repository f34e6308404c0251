#include "delegate/offers.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include <blobstore/reading.h>

#include "format/digest.h"
#include "os/fork.h"
#include "os/text.h"

namespace blobstore::internal {

namespace {

using Caches = std::vector<std::shared_ptr<const BlobCache>>;

struct Offers : ForkAware {
  std::mutex mutex; // nothing else is locked under it
  Caches caches;

  static Offers& get() {
    static auto* offers = new Offers; // delegates may be loaded while the process ends
    return *offers;
  }

  Offers() { enter(); }

  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override { renew(mutex); }
};

bool same(const BlobCache& cache, const Blob& blob, const et::FreeableBuffer& bytes) {
  if (blob.size != bytes.size()) {
    return false;
  }
  if (blob.size == 0 || std::memcmp(blob.data, bytes.data(), blob.size) == 0) {
    return true;
  }
  const Digest found = digest(bytes.data(), bytes.size());
  return cache.file_digest(blob.key) == std::string(found.begin(), found.end());
}

enum class Fit { None, ByContent, ByKey };

/// How a cache fits a delegate. By key: some of its constants are in the cache alone.
Fit fit_of(const BlobCache& cache, const std::vector<DelegateConstant>& constants, const et::NamedDataMap* map) {
  const BlobCache::Reading reading(cache);
  Fit fit = Fit::None;
  for (const DelegateConstant& constant : constants) {
    const Blob* blob = cache.find(constant.key);
    auto theirs = map != nullptr ? map->get_data(constant.key) : et::Result<et::FreeableBuffer>(EtError::NotFound);
    if (blob == nullptr ? !theirs.ok() : theirs.ok() && !same(cache, *blob, *theirs)) {
      return Fit::None;
    }
    if (blob != nullptr) {
      fit = std::max(fit, theirs.ok() ? Fit::ByContent : Fit::ByKey);
    }
  }
  return fit;
}

} // namespace

void offer(std::shared_ptr<const BlobCache> cache) {
  Offers& offers = Offers::get();
  const std::lock_guard<std::mutex> guard(offers.mutex);
  offers.caches.push_back(std::move(cache));
}

void withdraw(const BlobCache& cache) noexcept {
  std::shared_ptr<const BlobCache> last; // destroyed after the lock
  Offers& offers = Offers::get();
  const std::lock_guard<std::mutex> guard(offers.mutex);
  const auto found =
      std::find_if(offers.caches.begin(), offers.caches.end(), [&](const auto& each) { return each.get() == &cache; });
  if (found != offers.caches.end()) {
    last = std::move(*found);
    offers.caches.erase(found);
  }
}

std::shared_ptr<const BlobCache> offered_for(
    const std::vector<DelegateConstant>& constants, const et::NamedDataMap* map) {
  Caches caches;
  {
    Offers& offers = Offers::get();
    const std::lock_guard<std::mutex> guard(offers.mutex);
    caches = offers.caches;
  }
  std::shared_ptr<const BlobCache> taken;
  Fit best = Fit::None;
  for (auto& cache : caches) { // the newest of those that fit by content
    const Fit fit = fit_of(*cache, constants, map);
    if (fit == Fit::None) {
      continue;
    }
    if (taken != nullptr && (fit == Fit::ByKey || best == Fit::ByKey)) {
      throw Failure{
          EtError::InvalidExternalData,
          ErrorKind::KeyConflict,
          format(
              "ExecuTorch was not given its weights, and both {} and {} have them; have one of them open while it is "
              "loaded",
              taken->name(),
              cache->name())};
    }
    best = fit;
    taken = std::move(cache);
  }
  return taken;
}

} // namespace blobstore::internal
