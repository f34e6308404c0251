#include "os/fork.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include <pthread.h>

#include "os/fair_lock.h"

namespace blobstore::internal {
namespace {

thread_local int nested = 0; // of this thread's executions

} // namespace

struct ForkHandlers {
  FairLock executions; // shared by executions, exclusive for a fork
  std::mutex mutex;
  std::vector<ForkAware*> all;

  /// Never destroyed: objects may outlive static destruction.
  static ForkHandlers& get() {
    static auto* handlers = [] {
      auto* made = new ForkHandlers;
      pthread_atfork(&before, &in_parent, &in_child);
      return made;
    }();
    return *handlers;
  }

  static void before() {
    ForkHandlers& handlers = get();
    if (nested == 0) { // otherwise this thread itself forks in an execution
      handlers.executions.lock(); // first of all, because an execution may need any other lock
    }
    handlers.mutex.lock();
    for (auto object = handlers.all.rbegin(); object != handlers.all.rend(); ++object) {
      (*object)->before_fork();
    }
  }

  static void in_parent() {
    ForkHandlers& handlers = get();
    for (ForkAware* object : handlers.all) {
      object->after_fork_in_parent();
    }
    handlers.mutex.unlock();
    if (nested == 0) {
      handlers.executions.unlock();
    }
  }

  static void in_child() {
    ForkHandlers& handlers = get();
    for (ForkAware* object : handlers.all) {
      object->after_fork_in_child();
    }
    renew(handlers.mutex);
    handlers.executions.renew();
    if (nested != 0) { // those of other threads stayed in the parent
      handlers.executions.lock_shared();
    }
  }
};

void ForkAware::enter() {
  ForkHandlers& handlers = ForkHandlers::get();
  const std::lock_guard<std::mutex> guard(handlers.mutex);
  handlers.all.push_back(this);
}

void ForkAware::leave() {
  ForkHandlers& handlers = ForkHandlers::get();
  const std::lock_guard<std::mutex> guard(handlers.mutex);
  handlers.all.erase(std::remove(handlers.all.begin(), handlers.all.end(), this), handlers.all.end());
}

Execution::Execution() {
  if (nested++ == 0) {
    ForkHandlers::get().executions.lock_shared();
  }
}

Execution::~Execution() {
  if (--nested == 0) {
    ForkHandlers::get().executions.unlock_shared();
  }
}

} // namespace blobstore::internal
