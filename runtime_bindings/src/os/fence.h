// Order between plain reads and writes of memory that processes share.
#pragma once

namespace blobstore::internal {

/// What comes before is done before what comes after, as a kill and other processes see it. As
/// `std::atomic_thread_fence`, which GCC refuses to compile for the thread sanitizer.
inline void full_fence() {
  __sync_synchronize();
}

} // namespace blobstore::internal
