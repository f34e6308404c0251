#include "cache/mapped_cache.h"

#include <exception>

#include "os/text.h"

namespace blobstore::internal {

MappedCache::MappedCache(
    const std::vector<std::string>& paths,
    Mode mode,
    std::string name,
    std::shared_ptr<BlobCache> base,
    std::shared_ptr<PackedStore> packed)
    : BlobCache(mode, std::move(name), std::move(base), std::move(packed)), blobs_(mode) {
  if (mode == Mode::Shared) {
    File file(paths[0], /*writable=*/true);
    if (file.size() == 0) {
      throw_error_in(ErrorKind::InvalidFile, paths[0], "the file is empty");
    }
    working_copy_ = std::make_unique<WorkingCopy>(std::move(file));
    blobs_.open_shared(*working_copy_, paths[0]);
  } else {
    for (const std::string& path : paths) {
      blobs_.open(path);
    }
  }
  for (size_t i = 0; this->base() && i < this->base()->size(); ++i) {
    const Blob& blob = this->base()->blob(i);
    if (!owns(blob.key)) {
      of_base_.push_back(&blob);
    }
  }
  enter();
}

std::vector<std::string> MappedCache::files() const {
  std::vector<std::string> paths;
  for (const Source& source : blobs_.sources()) {
    paths.push_back(source.path);
  }
  return paths;
}

const Blob* MappedCache::find(std::string_view key) const {
  lookups_.fetch_add(1, std::memory_order_relaxed);
  if (const Slot* slot = blobs_.find(key)) {
    return slot;
  }
  const Blob* blob = base() ? base()->find(key) : nullptr;
  if (blob == nullptr) {
    misses_.fetch_add(1, std::memory_order_relaxed);
  }
  return blob;
}

const Blob& MappedCache::blob(size_t index) const {
  const size_t own = blobs_.slots().size();
  return index < own ? *blobs_.slots()[index] : *of_base_[index - own];
}

uint64_t MappedCache::generation() const {
  const uint64_t mine = working_copy_ ? working_copy_->generation() : generation_.load(std::memory_order_acquire);
  return mine + (base() ? base()->generation() : 0);
}

uint64_t MappedCache::version(std::string_view key) const {
  const Slot* slot = blobs_.find(key);
  if (slot == nullptr) {
    if (base() && base()->find(key)) {
      return base()->version(key);
    }
    throw_missing(key);
  }
  return version_of(*slot);
}

uint64_t MappedCache::version_of(const Blob& blob) const {
  const auto& slot = static_cast<const Slot&>(blob);
  return working_copy_ ? working_copy_->version(slot.entry) : slot.version.load(std::memory_order_acquire);
}

Slot& MappedCache::own_slot(const std::string& key) const {
  Slot* slot = blobs_.find(key);
  if (slot == nullptr) {
    if (base() && base()->find(key)) {
      throw_error_in(
          ErrorKind::KeyNotFound, name(), "key '{}' belongs to the base {}; change it there", key, base()->name());
    }
    at(key); // throws
  }
  return *slot;
}

bool MappedCache::holds(const void* data, size_t size) const {
  return blobs_.overlaps(data, size) || (base() && base()->holds(data, size));
}

void MappedCache::follow(std::weak_ptr<CommitFollower> follower) const {
  followers_.add(std::move(follower));
  followed_.store(kNone, std::memory_order_release);
}

const Digest* MappedCache::digest_now(const Blob& blob) const {
  const auto& slot = static_cast<const Slot&>(blob);
  const Source& source = blobs_.source_of(slot);
  if (!source.table.manifest) {
    return nullptr;
  }
  return reinterpret_cast<const Digest*>(source.map.data() + source.table.manifest->digests) + slot.segment;
}

/// Let followers catch up with what other processes did; mode Shared. The lease is given back for that.
std::unique_ptr<WorkingCopy::Lease> MappedCache::follow_others(std::unique_ptr<WorkingCopy::Lease> lease) const {
  while (followed_.load(std::memory_order_acquire) != working_copy_->generation()) {
    const uint64_t generation = working_copy_->generation();
    uint64_t before = followed_.load(std::memory_order_acquire);
    if (!followers_.any_behind()) {
      followed_.compare_exchange_strong(before, generation); // unless a follower was added meanwhile
      continue;
    }
    working_copy_->unlock_shared(std::move(lease));
    {
      const std::lock_guard<std::mutex> turn(catching_up_);
      working_copy_->alone([&] { followers_.catch_up(); });
    }
    lease = working_copy_->lock_shared();
  }
  return lease;
}

void MappedCache::lock_shared() const {
  if (working_copy_) {
    working_copy_->check_unread();
  }
  lock_.lock_shared();
  if (!working_copy_) {
    return;
  }
  try {
    std::unique_ptr<WorkingCopy::Lease> lease = follow_others(working_copy_->lock_shared());
    const std::lock_guard<std::mutex> guard(leases_mutex_);
    leases_.push_back(std::move(lease));
  } catch (...) {
    lock_.unlock_shared();
    throw;
  }
}

void MappedCache::unlock_shared() const {
  if (working_copy_) {
    std::unique_ptr<WorkingCopy::Lease> lease; // any of them, as they are all alike
    {
      const std::lock_guard<std::mutex> guard(leases_mutex_);
      lease = std::move(leases_.back());
      leases_.pop_back();
    }
    working_copy_->unlock_shared(std::move(lease));
  }
  lock_.unlock_shared();
}

// A fork waits while bytes change. It does not wait for a commit that still waits for readers, because a reader may be
// this thread, or may need something that this thread holds. The child has one thread, so no other thread holds its
// locks.

void MappedCache::before_fork() {
  writing_.lock();
  leases_mutex_.lock();
  digests_mutex_.lock();
  followers_.before_fork();
  if (working_copy_) {
    working_copy_->before_fork();
  }
}

void MappedCache::after_fork_in_parent() {
  if (working_copy_) {
    working_copy_->after_fork_in_parent();
  }
  followers_.after_fork_in_parent();
  digests_mutex_.unlock();
  leases_mutex_.unlock();
  writing_.unlock();
}

void MappedCache::after_fork_in_child() {
  renew(commit_);
  renew(catching_up_);
  renew(digests_mutex_);
  renew(writing_);
  lock_.renew();
  renew(leases_mutex_);
  followers_.after_fork_in_child();
  leases_.clear();
  if (working_copy_) {
    working_copy_->after_fork_in_child();
  }
  if (ThreadReadings::any(*this)) { // the thread's Reading goes on
    try {
      if (working_copy_) {
        leases_.push_back(working_copy_->lock_again());
      }
      lock_.lock_shared();
    } catch (const std::exception&) { // the next Reading tries again, and can report it
      ThreadReadings::lose(*this);
    }
  }
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

std::shared_ptr<BlobCache> BlobCache::open(
    const std::vector<std::string>& paths,
    Mode mode,
    std::shared_ptr<BlobCache> base,
    std::shared_ptr<PackedStore> packed) {
  std::string name = internal::joined(paths, " + ");
  if (base) {
    base->check_open();
    name += (name.empty() ? "over " : " over ") + base->name();
  } else if (paths.empty()) {
    name = "(no files)";
  }
  if (mode == Mode::Shared && paths.size() != 1) {
    internal::throw_error_in(
        ErrorKind::Unsupported,
        name,
        "a shared cache is one working copy, not {} files; make one of them",
        paths.size());
  }
  return std::make_shared<internal::MappedCache>(paths, mode, std::move(name), std::move(base), std::move(packed));
}

BlobCache::Reading::Reading(const BlobCache& cache)
    : base_(cache.base() ? std::make_unique<Reading>(*cache.base()) : nullptr),
      cache_(cache),
      thread_(internal::ThreadReadings::mine()) {
  if (thread_->begin(cache)) {
    cache.lock_shared();
    thread_->add(cache, internal::mapped(cache));
  }
}

BlobCache::Reading::~Reading() {
  if (thread_->end(cache_)) {
    cache_.unlock_shared();
  }
}

} // namespace blobstore
