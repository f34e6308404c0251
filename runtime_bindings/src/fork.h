// What happens to locks when the process forks: the child has one thread, but a copy of all locks as they were.
#pragma once

namespace blobstore {

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

} // namespace blobstore
