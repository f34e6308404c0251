// What happens to locks when the process forks: the child has one thread, but a copy of all locks as they were.
#pragma once

#include <new>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace blobstore {

/// Make a mutex anew in a forked child, whichever thread of the parent holds it: no thread here could unlock it.
template <typename Mutex>
void renew(Mutex& mutex) {
#ifdef __SANITIZE_THREAD__
  __tsan_mutex_destroy(&mutex, 0); // its constructor is no call that ThreadSanitizer sees
#endif
  new (&mutex) Mutex;
}

/// Something with locks. A subclass enters a list that fork handlers go through when it is complete, and leaves it
/// before it is destroyed. Locks are taken in the reverse order: what was entered first may be needed by the later.
class ForkAware {
 public:
  virtual ~ForkAware() = default;

 protected:
  void enter();
  void leave();

 private:
  friend struct ForkHandlers;
  virtual void before_fork() {} // in the parent: wait until nothing is half done
  virtual void after_fork_in_parent() {}
  virtual void after_fork_in_child() {} // make the locks anew
};

/// Held around a method's execution; may be nested. A fork waits for those of other threads, as kernels use ExecuTorch's
/// thread pool: if another thread holds the pool's mutex, a forked child would wait for it for ever (ThreadPool::run and
/// get_threadpool in extension/threadpool/threadpool.cpp).
class Execution {
 public:
  Execution();
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
};

} // namespace blobstore
