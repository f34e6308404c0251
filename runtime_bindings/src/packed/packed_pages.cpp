#include "packed/packed_pages.h"

#include <algorithm>
#include <map>
#include <utility>

#include "os/fork.h"
#include "os/mapped_files.h"
#include "os/text.h"

namespace blobstore::internal {

/// All of this process. It is entered before any cache, so a fork takes these locks last: commits take them while they
/// hold locks of the cache.
struct PackedPages::Registry : ForkAware {
  std::recursive_mutex mutex; // guards what follows
  std::set<PackedPages*> living;
  std::map<std::pair<uint64_t, const PackedLease*>, std::weak_ptr<PackedPages>> all; // by cache and lease

  static Registry& get() {
    static auto* registry = new Registry; // delegates may be destroyed while the process ends, in any order
    return *registry;
  }

  Registry() { enter(); }

  void before_fork() override {
    mutex.lock();
    for (PackedPages* pages : living) {
      pages->mutex_.lock();
    }
  }
  void after_fork_in_parent() override {
    for (PackedPages* pages : living) {
      pages->mutex_.unlock();
    }
    mutex.unlock();
  }
  void after_fork_in_child() override {
    for (PackedPages* pages : living) {
      renew(pages->mutex_);
      for (auto& [at, entry] : pages->entries_) { // commits of other threads stayed in the parent
        entry.pending.reset();
      }
    }
    renew(mutex);
  }

  static const Registry& entered; // when the library is loaded
};

const PackedPages::Registry& PackedPages::Registry::entered = get();

void PackedPages::Write::apply() noexcept {
  const std::lock_guard<std::mutex> guard(pages_->mutex_);
  if (!done_) {
    done_ = true;
    pages_->write(*this);
  }
}

std::shared_ptr<PackedPages> PackedPages::of(
    const std::shared_ptr<const BlobCache>& cache,
    std::shared_ptr<PackedFolder> store,
    const std::shared_ptr<const PackedLease>& lease) {
  if (!BLOBSTORE_LINUX || cache->mode() == BlobCache::Mode::Shared) {
    return nullptr;
  }
  Registry& registry = Registry::get();
  const std::lock_guard<std::recursive_mutex> guard(registry.mutex);
  std::weak_ptr<PackedPages>& known = registry.all[{cache->id(), lease.get()}];
  std::shared_ptr<PackedPages> pages = known.lock();
  if (pages == nullptr) {
    pages = std::make_shared<PackedPages>(cache, std::move(store), lease);
    known = pages;
    for (auto entry = registry.all.begin(); entry != registry.all.end();) {
      entry = entry->second.expired() ? registry.all.erase(entry) : std::next(entry);
    }
  }
  return pages;
}

PackedPages::PackedPages(
    std::shared_ptr<const BlobCache> cache,
    std::shared_ptr<PackedFolder> store,
    std::shared_ptr<const PackedLease> lease)
    : cache_(std::move(cache)), store_(std::move(store)), lease_(std::move(lease)), file_(lease_->file().reopen()) {
  path_ = format("/proc/self/fd/{}", file_.descriptor());
  Registry& registry = Registry::get();
  const std::lock_guard<std::recursive_mutex> guard(registry.mutex);
  registry.living.insert(this);
}

PackedPages::~PackedPages() {
  Registry& registry = Registry::get();
  const std::lock_guard<std::recursive_mutex> guard(registry.mutex);
  registry.living.erase(this);
}

void PackedPages::manage(const PackedEntry& at, const std::vector<std::string>& keys) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto [found, fresh] = entries_.try_emplace(&at);
  if (fresh) {
    found->second.map = &lease_->map_of(at);
    for (const std::string& key : keys) {
      const Blob* blob = key.empty() ? nullptr : cache_->find(key);
      found->second.blobs.push_back(blob);
    }
    if (base_ != nullptr) {
      synchronize(at, found->second);
    }
  }
}

void PackedPages::before_init() {
  Registry& registry = Registry::get();
  const std::lock_guard<std::recursive_mutex> all(registry.mutex);
  const std::lock_guard<std::mutex> guard(mutex_);
  if (handles_ == 0) {
    const bool alone = std::none_of(registry.living.begin(), registry.living.end(), [&](const PackedPages* other) {
      return other != this && other->handles_ != 0; // all change under the lock of all handles
    });
    others_ = alone ? std::vector<uint8_t*>() : shared_maps_of(file_); // reading all maps takes a while
  }
}

bool PackedPages::after_init() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (handles_ == 0) {
    for (uint8_t* map : shared_maps_of(file_)) {
      if (std::find(others_.begin(), others_.end(), map) == others_.end()) {
        base_ = map;
      }
    }
    if (base_ == nullptr) {
      return false;
    }
    for (auto& [at, entry] : entries_) {
      entry.pages.reset();
      synchronize(*at, entry);
    }
  }
  ++handles_;
  return true;
}

void PackedPages::after_destroy() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (--handles_ == 0) { // ExecuTorch has unmapped the file
    base_ = nullptr;
    for (auto& [at, entry] : entries_) {
      entry.pages.reset();
    }
  }
}

PackedPages::Writes PackedPages::prepare(const StagedCommit& commit, const std::set<const PackedEntry*>& entries) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Writes writes;
  for (const PackedEntry* at : entries) {
    Entry& entry = entries_.at(at);
    const bool restores = std::all_of(entry.blobs.begin(), entry.blobs.end(), [&](const Blob* blob) {
      return blob == nullptr ||
          (commit.changes(*blob) ? commit.restores_file() : !cache_->differs_from_file(blob->key));
    });
    std::shared_ptr<Write> write = entry.pending.lock(); // of another delegate
    if (write == nullptr || write->done_) {
      write = prepare_write(*at, entry, &commit, restores);
      entry.pending = write;
    }
    writes.push_back(std::move(write));
  }
  return writes;
}

/// Allocate what a write takes. @param commit nullptr to write what the blobs have now.
std::shared_ptr<PackedPages::Write> PackedPages::prepare_write(
    const PackedEntry& at, Entry& entry, const StagedCommit* commit, bool restores) {
  auto write = std::make_shared<Write>();
  write->pages_ = shared_from_this();
  write->entry_ = &entry;
  write->restores_ = restores;
  if (restores) {
    return write;
  }
  for (const Blob* blob : entry.blobs) {
    const bool staged = blob != nullptr && commit != nullptr && commit->changes(*blob);
    const uint8_t* bytes = staged ? commit->bytes(*blob) : blob != nullptr ? blob->data : nullptr;
    write->sources_.push_back({bytes, blob != nullptr ? blob->size : 0});
    write->changed_.push_back(staged || commit == nullptr);
  }
  if (!entry.pages) {
    const uint64_t size = align_up(at.size, page_size()); // entries begin with a page
    make_private(base_ + at.offset, size, file_, at.offset);
    entry.pages.emplace(base_ + at.offset, size, file_, at.offset);
  }
  write->fresh_ = entry.pages->prepare_fresh(format("packed weights '{}'", at.name));
  return write;
}

void PackedPages::write(Write& write) noexcept {
  Entry& entry = *write.entry_;
  if (!entry.pages) { // it was never changed, or no program runs on these pages any more
    return;
  }
  if (write.restores_) {
    entry.pages->restore_whole_pages();
    return;
  }
  if (entry.pages->write_fresh(std::move(write.fresh_))) {
    write.changed_.assign(write.changed_.size(), true);
  }
  entry.map->update(write.sources_, write.changed_, entry.pages->data());
  store_->note_written();
}

/// Give an entry that no handle uses yet the bytes of the cache.
void PackedPages::synchronize(const PackedEntry& at, Entry& entry) {
  const bool differs = std::any_of(entry.blobs.begin(), entry.blobs.end(), [&](const Blob* blob) {
    return blob != nullptr && cache_->differs_from_file(blob->key);
  });
  if (differs) {
    write(*prepare_write(at, entry, nullptr, /*restores=*/false));
  }
}

} // namespace blobstore::internal
