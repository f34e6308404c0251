// The interpreter's lock. When the interpreter ends, it ends a daemon thread that takes the lock again by unwinding the
// thread's stack, which aborts the process at a noexcept frame. Such a thread waits here instead until the process has
// ended, as it does from Python 3.14 on.
#pragma once

#include <exception>

#include <nanobind/nanobind.h>

#include "os/process_end.h"

namespace blobstore::python {

/// Releases the lock while it lives. The thread must not use Python objects meanwhile.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      internal::wait_for_ever();
    }
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

/// Call a function that may run Python code, during which the lock may be released and taken again.
template <typename Function>
auto run_python(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    internal::wait_for_ever();
  }
}

} // namespace blobstore::python
