// What threads may do while the process ends.
#pragma once

namespace blobstore {

/// Held while a thread works in ExecuTorch: runs a method, loads it or makes or destroys a backend's handle. May be
/// nested. Its backends and their threads are static objects, which do not outlive the process' last statements; so once
/// the process ends, no thread begins such work, and the end waits for work that was begun.
class BackendWork {
 public:
  BackendWork();
  ~BackendWork();
  BackendWork(const BackendWork&) = delete;
  BackendWork& operator=(const BackendWork&) = delete;
};

/// To be called by the thread that ends the process, before static objects are destroyed: waits until no other thread
/// works in ExecuTorch. Other threads that want to do so later wait for ever.
void end_backend_work();

/// Wait until the process is gone.
[[noreturn]] void wait_for_ever();

} // namespace blobstore
