// The interpreter's lock. When the interpreter ends, it ends a daemon thread that takes the lock again by unwinding the
// thread's stack, which aborts the process at a noexcept frame. Such a thread waits here instead until the process has
// ended, as it does from Python 3.14 on.
#pragma once

#include <exception>

#include <nanobind/nanobind.h>

#include "os/process_end.h"

namespace blobstore::python {

/// Stops the unwinding that ends a thread, but no exception. It must not be a handler, `catch (...)`: the process
/// aborts if a handler takes such an unwinding while the thread handles an exception, as it does where errors are
/// translated.
class UnwindingStop {
 public:
  UnwindingStop() = default;
  ~UnwindingStop() {
    if (!passed_ && std::uncaught_exceptions() == exceptions_) {
      internal::wait_for_ever();
    }
  }
  UnwindingStop(const UnwindingStop&) = delete;
  UnwindingStop& operator=(const UnwindingStop&) = delete;

  /// What could end the thread has returned.
  void pass() { passed_ = true; }

 private:
  const int exceptions_ = std::uncaught_exceptions(); // the unwinding that ends a thread is not counted
  bool passed_ = false;
};

/// Call a function that may run Python code, during which the lock may be released and taken again. While Python code
/// runs, no function on the way to it may be noexcept, and none may hold a reference, which would be given back without
/// the lock.
///
/// Not inlined, because in a noexcept function nothing needs to be destroyed.
template <typename Function>
[[gnu::noinline]] auto run_python(Function function) -> decltype(function()) {
  UnwindingStop stop;
  auto result = function();
  stop.pass();
  return result;
}

/// Call a function of Python. Where a thread ends in it, no frame above has been left, so that no reference is given
/// back without the lock.
/// @throws nb::python_error.
template <typename... Arguments>
nanobind::object call_python(nanobind::handle function, const Arguments&... arguments) {
  PyObject* const all[] = {arguments.ptr()...};
  PyObject* const made =
      run_python([&] { return PyObject_Vectorcall(function.ptr(), all, sizeof...(arguments), nullptr); });
  if (made == nullptr) {
    throw nanobind::python_error();
  }
  return nanobind::steal(made);
}

/// Releases the lock while it lives. The thread must not use Python objects meanwhile.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() {
    run_python([this] {
      PyEval_RestoreThread(state_);
      return true;
    });
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

/// Call a function that uses no Python objects, without the lock.
template <typename Function>
auto without_interpreter(const Function& function) -> decltype(function()) {
  const WithoutInterpreter release;
  return function();
}

} // namespace blobstore::python
