// What threads may do while the process ends.
#pragma once

namespace blobstore::internal {

/// Held while a thread works in ExecuTorch: runs or loads a method, or makes or destroys a backend's handle. May be
/// nested. ExecuTorch's backends and their threads are static objects, which are destroyed when the process ends. So
/// once the process is ending, no thread may begin such work, and the end waits for work that has begun.
class BackendWork {
 public:
  BackendWork();
  ~BackendWork();
  BackendWork(const BackendWork&) = delete;
  BackendWork& operator=(const BackendWork&) = delete;
};

/// Wait until no other thread works in ExecuTorch. The thread that ends the process calls it before static objects are
/// destroyed. Other threads that try to begin such work later wait for ever.
void end_backend_work();

/// Wait until the process has ended.
[[noreturn]] void wait_for_ever();

} // namespace blobstore::internal
