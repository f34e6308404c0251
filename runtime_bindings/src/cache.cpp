#include <blobstore/cache.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "file.h"
#include "fork.h"
#include "ptd_reader.h"

namespace blobstore {

/// What one thread reads; a handful of caches at most. Another thread may end a reading, so it has a mutex.
struct BlobCache::HeldByThread {
  struct Entry {
    const BlobCache* cache;
    int depth;
  };
  struct All;

  HeldByThread();
  ~HeldByThread();

  std::mutex mutex;
  std::vector<Entry> entries;

  /// This thread's; nothing if it never read.
  static std::shared_ptr<HeldByThread>& known() {
    thread_local std::shared_ptr<HeldByThread> held;
    return held;
  }

  static const std::shared_ptr<HeldByThread>& mine() {
    std::shared_ptr<HeldByThread>& held = known();
    if (held == nullptr) {
      held = std::make_shared<HeldByThread>();
    }
    return held;
  }

  Entry* find(const BlobCache* cache) {
    for (Entry& entry : entries) {
      if (entry.cache == cache) {
        return &entry;
      }
    }
    return nullptr;
  }

  void remove(const BlobCache* cache) {
    if (Entry* entry = find(cache)) {
      std::swap(*entry, entries.back());
      entries.pop_back();
    }
  }
};

/// Those of all threads. In a forked child only the thread that forked goes on reading.
struct BlobCache::HeldByThread::All final : ForkAware {
  std::mutex mutex;
  std::vector<HeldByThread*> held;

  static All& get() {
    static auto* all = new All; // threads may outlive static destruction
    return *all;
  }

 private:
  All() { enter(); }

  void before_fork() override {
    mutex.lock();
    for (HeldByThread* thread : held) {
      thread->mutex.lock();
    }
  }
  void after_fork_in_parent() override {
    for (HeldByThread* thread : held) {
      thread->mutex.unlock();
    }
    mutex.unlock();
  }
  void after_fork_in_child() override {
    for (HeldByThread* thread : held) {
      renew(thread->mutex);
      if (thread != known().get()) {
        thread->entries.clear();
      }
    }
    renew(mutex);
  }
};

BlobCache::HeldByThread::HeldByThread() {
  All& all = All::get();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.held.push_back(this);
}

BlobCache::HeldByThread::~HeldByThread() {
  All& all = All::get();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.held.erase(std::find(all.held.begin(), all.held.end(), this));
}

namespace {

std::atomic<uint64_t> next_id{1};

} // namespace

BlobCache::BlobCache(Mode mode, std::string name, std::shared_ptr<BlobCache> base)
    : id_(next_id.fetch_add(1)), mode_(mode), name_(std::move(name)), base_(std::move(base)) {
  HeldByThread::All::get(); // a forked child asks it before it makes this cache's locks anew
}

const Blob& BlobCache::at(std::string_view key) const {
  check_open();
  const Blob* blob = find(key);
  if (blob == nullptr) {
    throw_missing(key);
  }
  return *blob;
}

void BlobCache::throw_missing(std::string_view key) const {
  throw Error(
      ErrorKind::KeyNotFound, name_, "no key '" + std::string(key) + "' among " + std::to_string(size()) + " keys");
}

void BlobCache::check_open() const {
  if (closed()) {
    throw Error(ErrorKind::Closed, name_, "the cache is closed");
  }
}

uint64_t BlobCache::load(const std::string& path) {
  check_open();
  const File file(path, false);
  const uint64_t size = file.size();
  if (size == 0) {
    throw Error(ErrorKind::InvalidFile, path, "the file is empty");
  }
  const Mapping map(size);
  file.read(map.data(), size, 0);
  const PtdTable table = read_ptd(path, map.data(), size);
  verify_ptd(path, map.data(), table);
  std::vector<Change> changes;
  for (const PtdEntry& entry : table.entries) {
    if (entry.key.rfind(kRecordPrefix, 0) == 0 && !owns(entry.key)) {
      continue; // a record about blobs, which this cache never had
    }
    const PtdSegment& segment = table.segments[entry.segment];
    changes.push_back({entry.key, map.data() + segment.start, segment.size, &entry.layout});
  }
  try {
    return update(changes);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::KeyNotFound || error.kind() == ErrorKind::Layout) {
      throw Error(error.kind(), path, error.what());
    }
    throw;
  }
}

BlobCache::Reading::Reading(const BlobCache& cache)
    : base_(cache.base() ? std::make_unique<Reading>(*cache.base()) : nullptr),
      cache_(cache),
      thread_(HeldByThread::mine()) {
  {
    const std::lock_guard<std::mutex> guard(thread_->mutex);
    if (HeldByThread::Entry* entry = thread_->find(&cache)) {
      ++entry->depth;
      return;
    }
  }
  cache.lock_shared();
  const std::lock_guard<std::mutex> guard(thread_->mutex);
  thread_->entries.push_back({&cache, 1});
}

BlobCache::Reading::~Reading() {
  {
    const std::lock_guard<std::mutex> guard(thread_->mutex);
    HeldByThread::Entry* entry = thread_->find(&cache_);
    if (entry == nullptr || --entry->depth != 0) { // nothing: lost in a forked child
      return;
    }
    thread_->remove(&cache_);
  }
  cache_.unlock_shared();
}

BlobCache::Alone::Alone(const BlobCache& cache) : cache_(cache) {
  HeldByThread& thread = *HeldByThread::mine();
  const std::lock_guard<std::mutex> guard(thread.mutex);
  thread.entries.push_back({&cache, 1});
}

BlobCache::Alone::~Alone() {
  HeldByThread& thread = *HeldByThread::mine();
  const std::lock_guard<std::mutex> guard(thread.mutex);
  thread.remove(&cache_);
}

bool BlobCache::held_by_this_thread() const {
  const std::shared_ptr<HeldByThread>& thread = HeldByThread::known();
  if (thread == nullptr) {
    return false;
  }
  const std::lock_guard<std::mutex> guard(thread->mutex);
  return thread->find(this) != nullptr;
}

void BlobCache::lose_reading() const {
  HeldByThread& thread = *HeldByThread::mine();
  const std::lock_guard<std::mutex> guard(thread.mutex);
  thread.remove(this);
}

} // namespace blobstore
