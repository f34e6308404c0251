// The interpreter's lock. When the interpreter ends, a daemon thread that wants the lock again is ended by unwinding its
// stack, which aborts the process where it meets a frame that lets nothing through. Such a thread waits here instead, as
// it does from Python 3.14 on, until the process is gone.
#pragma once

#include <exception>

#include <nanobind/nanobind.h>

#include "os/process_end.h"

namespace blobstore::python {

/// While it lives, other threads may have the lock; this one uses no Python objects.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      wait_for_ever();
    }
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

/// Call something that may run Python code, where the lock may be given away and taken again.
template <typename Function>
auto run_python(Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const std::exception&) {
    throw;
  } catch (...) {
    wait_for_ever();
  }
}

} // namespace blobstore::python
