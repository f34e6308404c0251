#include "os/process_end.h"

#include <condition_variable>
#include <mutex>
#include <new>

#include <unistd.h>

#include "os/fork.h"

namespace blobstore::internal {
namespace {

thread_local int depth = 0; // of this thread's work

struct Work : ForkAware {
  std::mutex mutex;
  std::condition_variable none;
  int threads = 0; // how many are working
  bool ended = false;

  static Work& get() {
    static auto* work = new Work; // the process may end in any order
    return *work;
  }

  Work() { enter(); }

  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override { // the threads stayed in the parent
    renew(mutex);
    new (&none) std::condition_variable;
    threads = depth != 0 ? 1 : 0;
  }
};

} // namespace

BackendWork::BackendWork() {
  if (depth++ != 0) {
    return;
  }
  Work& work = Work::get();
  {
    const std::lock_guard<std::mutex> guard(work.mutex);
    if (!work.ended) {
      ++work.threads;
      return;
    }
  }
  wait_for_ever();
}

BackendWork::~BackendWork() {
  if (--depth != 0) {
    return;
  }
  Work& work = Work::get();
  const std::lock_guard<std::mutex> guard(work.mutex);
  if (--work.threads == 0) {
    work.none.notify_all();
  }
}

void end_backend_work() {
  Work& work = Work::get();
  std::unique_lock<std::mutex> guard(work.mutex);
  const int own = depth != 0 ? 1 : 0;
  ++depth; // what this thread destroys from here on must not wait
  work.ended = true;
  work.none.wait(guard, [&] { return work.threads == own; });
}

void wait_for_ever() {
  for (;;) {
    pause();
  }
}

} // namespace blobstore::internal
