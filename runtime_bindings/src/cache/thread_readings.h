// Which caches each thread reads.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <blobstore/cache.h>

#include "os/file.h"

namespace blobstore::internal {

/// What has locks on files that keep processes apart.
class FileLocks {
 public:
  /// Whether they are on one of these files.
  virtual bool has_locks_on(const File& data, const File& gate) const = 0;

 protected:
  ~FileLocks() = default;
};

/// The Readings of one thread: a handful of caches at most. Another thread may end a Reading, so there is a mutex.
class ThreadReadings {
 public:
  /// Those of the calling thread.
  static const std::shared_ptr<ThreadReadings>& mine();
  /// Whether the calling thread has a Reading of the cache.
  static bool any(const BlobCache& cache);
  /// Call before waiting for the locks of a working copy. A thread that reads it through another cache would wait for a
  /// commit that waits for this thread.
  /// @param gate the file beside it; may be closed.
  /// @throws Error Unsupported: the calling thread reads a working copy whose locks are on one of these files.
  static void check_none_on(const File& data, const File& gate);
  /// Forget the calling thread's Readings of a cache without giving back a lock, which could not be had in a forked
  /// child.
  static void lose(const BlobCache& cache);
  /// Register for forks before a cache does, because a forked child asks `any` when it renews the cache's locks.
  static void watch_forks();

  ThreadReadings();
  ~ThreadReadings();
  ThreadReadings(const ThreadReadings&) = delete;
  ThreadReadings& operator=(const ThreadReadings&) = delete;

  /// @returns true if this is the thread's first Reading of the cache: the lock must be taken, then `add` called.
  bool begin(const BlobCache& cache);
  void add(const BlobCache& cache, const FileLocks& locks);
  /// @returns true if this was the thread's last Reading of the cache: the lock must be given back.
  bool end(const BlobCache& cache);

 private:
  struct Entry {
    const BlobCache* cache;
    const FileLocks* locks; // of the cache
    int depth;
  };
  struct All;

  Entry* find(const BlobCache& cache);
  void remove(const BlobCache& cache);

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

/// While it lives, this thread counts as one with a Reading. It takes no lock, because the thread holds the exclusive
/// one.
class CountsAsReading {
 public:
  CountsAsReading(const BlobCache& cache, const FileLocks& locks) : cache_(cache) {
    ThreadReadings::mine()->add(cache, locks);
  }
  ~CountsAsReading() { ThreadReadings::lose(cache_); }
  CountsAsReading(const CountsAsReading&) = delete;
  CountsAsReading& operator=(const CountsAsReading&) = delete;

 private:
  const BlobCache& cache_;
};

} // namespace blobstore::internal
