// A lock for many readers or one writer, where neither side can keep the other out for ever.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "os/renew.h"

namespace blobstore::internal {

/// Readers share the lock, a writer has it alone. A waiting writer stops new readers. When it leaves, all readers that
/// waited get the lock before the next writer. Without a writer, entering and leaving costs a reader one atomic
/// operation each.
class FairLock {
 public:
  void lock_shared() {
    uint32_t state = state_.load(std::memory_order_relaxed);
    while ((state & kWriter) == 0) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
        return;
      }
    }
    std::unique_lock<std::mutex> guard(mutex_);
    if ((state_.load(std::memory_order_relaxed) & kWriter) == 0) {
      state_.fetch_add(1, std::memory_order_acquire);
      return;
    }
    ++waiting_;
    const uint64_t turn = turn_;
    readers_.wait(guard, [&] { return turn_ != turn; }); // the writer that leaves counts us in
  }

  void unlock_shared() {
    if (state_.fetch_sub(1, std::memory_order_acq_rel) == (kWriter | 1)) {
      const std::lock_guard<std::mutex> guard(mutex_);
      writer_.notify_one();
    }
  }

  void lock() {
    writers_.lock();
    std::unique_lock<std::mutex> guard(mutex_);
    state_.fetch_or(kWriter, std::memory_order_acq_rel);
    writer_.wait(guard, [&] { return state_.load(std::memory_order_acquire) == kWriter; });
  }

  void unlock() {
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      state_.store(waiting_, std::memory_order_release);
      waiting_ = 0;
      ++turn_;
      readers_.notify_all();
    }
    writers_.unlock();
  }

  /// See `internal::renew`.
  void renew() {
    internal::renew(writers_);
    internal::renew(mutex_);
    new (this) FairLock;
  }

 private:
  static constexpr uint32_t kWriter = 1u << 31;

  std::atomic<uint32_t> state_{0}; // number of readers, and whether a writer has the lock or waits for it
  std::mutex writers_;
  std::mutex mutex_;
  std::condition_variable readers_;
  std::condition_variable writer_;
  uint32_t waiting_ = 0;
  uint64_t turn_ = 0;
};

} // namespace blobstore::internal
