// Places where a test can have the process killed, so that recovery is tested at each of them.
#pragma once

#include <atomic>
#include <csignal>
#include <cstdint>

#include <unistd.h>

namespace blobstore {

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
};

inline std::atomic<int> crash_point{0};

/// Kill this process, as `kill -9` does, if a test asked for this point.
inline void crash_here(CrashPoint point) {
  if (crash_point.load(std::memory_order_relaxed) == static_cast<int>(point)) {
    kill(getpid(), SIGKILL);
  }
}

} // namespace blobstore
