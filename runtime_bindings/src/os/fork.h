// What happens to locks when the process forks: the child has one thread, but a copy of all locks in their state.
#pragma once

#include "os/renew.h"

namespace blobstore::internal {

/// An object with locks. A subclass calls `enter` when it is complete and `leave` before it is destroyed. Before a
/// fork, the locks of all entered objects are taken, last entered first, because later objects may use earlier ones
/// while they hold their own locks.
class ForkAware {
 public:
  virtual ~ForkAware() = default;

 protected:
  void enter();
  void leave();

 private:
  friend struct ForkHandlers;
  virtual void before_fork() {} // in the parent: wait until nothing is half done, and keep it so
  virtual void after_fork_in_parent() {}
  virtual void after_fork_in_child() {} // renew the locks
};

/// Held around a method's execution; may be nested. A fork waits for the executions of other threads, because kernels
/// use ExecuTorch's thread pool: if another thread held the pool's mutex, a forked child would wait for it for ever
/// (ThreadPool::run and get_threadpool in extension/threadpool/threadpool.cpp).
class Execution {
 public:
  Execution();
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
};

} // namespace blobstore::internal
