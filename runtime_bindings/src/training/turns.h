// A lock for the state of a training program, which reports in a forked child that the state may be incomplete.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

#include "os/fork.h"

namespace blobstore::internal {

/// A lock that the thread that holds it may take again. If a process is forked while another thread holds it, the
/// guarded state may be half changed in the child, where taking the lock is an error.
///
/// Not std::recursive_mutex, which does not know its owner again in a forked child.
class Turns final : private ForkAware {
 public:
  /// @param path, name of the guarded state, for messages.
  Turns(std::string path, std::string name);
  ~Turns() override;
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  /// @throws Error Training.
  void lock();
  void unlock();

 private:
  void after_fork_in_child() override;

  const std::string path_;
  const std::string name_;
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
  size_t depth_ = 0; // how often the owner took it
  bool torn_ = false;
};

} // namespace blobstore::internal
