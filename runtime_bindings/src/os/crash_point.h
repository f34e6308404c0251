// Places where a test can kill the process, so that recovery is tested at each of them. They exist only in test builds
// (-DBLOBSTORE_TEST_HOOKS=ON).
#pragma once

#ifdef BLOBSTORE_TEST_HOOKS
#include <atomic>
#include <csignal>

#include <unistd.h>
#endif

namespace blobstore::internal {

enum class CrashPoint : int {
  None = 0,
  BeforeJournal,
  InJournal,
  AfterJournal,
  AfterPending,
  InApply,
  AfterApply,
  BeforeDone,
  AfterDone,
  InPacked,
  AfterPacked,
};

#ifdef BLOBSTORE_TEST_HOOKS

inline std::atomic<int> crash_point{0};

/// Kill this process, as `kill -9` does, if a test asked for this point.
inline void crash_here(CrashPoint point) {
  if (crash_point.load(std::memory_order_relaxed) == static_cast<int>(point)) {
    kill(getpid(), SIGKILL);
  }
}

#else

inline void crash_here(CrashPoint) {}

#endif

} // namespace blobstore::internal
