#include "training/turns.h"

#include <utility>

#include <blobstore/error.h>

#include "os/text.h"

namespace blobstore::internal {

Turns::Turns(std::string path, std::string name) : path_(std::move(path)), name_(std::move(name)) {
  enter();
}

Turns::~Turns() {
  leave();
}

void Turns::lock() {
  const std::thread::id self = std::this_thread::get_id();
  if (owner_.load() == self) {
    ++depth_;
    return;
  }
  mutex_.lock();
  if (torn_) {
    mutex_.unlock();
    throw_error_in(
        ErrorKind::Training,
        path_,
        "{}: another thread was using it when this process was forked, so a step may be half done here; load the "
        "program again and continue from a checkpoint",
        name_);
  }
  owner_.store(self);
  depth_ = 1;
}

void Turns::unlock() {
  if (--depth_ == 0) {
    owner_.store(std::thread::id());
    mutex_.unlock();
  }
}

void Turns::after_fork_in_child() {
  if (owner_.load() == std::this_thread::get_id()) {
    return;
  }
  if (mutex_.try_lock()) {
    mutex_.unlock();
  } else {
    renew(mutex_);
    torn_ = true;
  }
  owner_.store(std::thread::id());
}

} // namespace blobstore::internal
