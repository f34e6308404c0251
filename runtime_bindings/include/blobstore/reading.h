// Holding off commits while bytes of a cache are read.
#pragma once

#include <memory>

#include <blobstore/cache.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

namespace internal BLOBSTORE_HIDDEN {
class ThreadReadings;
}

/// While a Reading lives, no commit changes the cache or its base: everything that is read belongs to one generation.
/// `Method::execute` takes one itself; code that reads `Blob::data` must take its own.
///
/// The constructor blocks while a commit changes bytes or waits for earlier Readings to end. Readings of one cache may
/// be nested in a thread; a nested one never blocks. Keep it short, because commits wait for it. The thread that made
/// it gets an error if it commits meanwhile. Another thread may destroy it. The cache must outlive it.
///
/// After a fork, Readings of the forking thread continue in the child, unless the process has no file descriptors left
/// for the locks of a shared working copy. Readings that do not continue, and those of other threads, no longer hold
/// off commits in the child. Functions that the child calls take their own Reading, so they see one generation or
/// report the error.
///
/// @throws Error FileAccess, Integrity: the lock of a shared working copy cannot be taken, or an interrupted commit
///   cannot be finished. Unsupported: the thread reads the same working copy through another cache.
class BlobCache::Reading {
 public:
  explicit Reading(const BlobCache& cache);
  ~Reading();
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

 private:
  std::unique_ptr<Reading> base_; // taken first, given back last
  const BlobCache& cache_;
  std::shared_ptr<internal::ThreadReadings> thread_; // of the thread that made it
};

} // namespace blobstore
