#include "fork.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include <pthread.h>

namespace blobstore {

struct ForkHandlers {
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
  }

  static void in_child() {
    ForkHandlers& handlers = get();
    for (ForkAware* object : handlers.all) {
      object->after_fork_in_child();
    }
    renew(handlers.mutex);
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

} // namespace blobstore
