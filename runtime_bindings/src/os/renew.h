// Locks in a forked child, which has a copy of all locks in their state.
#pragma once

#include <new>

#include "os/platform.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace blobstore::internal {

/// Replace a mutex in a forked child. If another thread of the parent held it, no thread of the child could unlock it.
template <typename Mutex>
void renew(Mutex& mutex) {
#ifdef __SANITIZE_THREAD__
  __tsan_mutex_destroy(&mutex, 0); // ThreadSanitizer does not see the constructor
#endif
  new (&mutex) Mutex;
}

} // namespace blobstore::internal
