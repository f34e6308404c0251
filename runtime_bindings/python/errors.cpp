// The library's errors as Python exceptions, which the Python side makes.
#include <exception>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

/// The name of a kind for the Python side: as in the enum, in lower case with underscores.
const char* name_of(ErrorKind kind) {
  constexpr const char* kNames[] = {
      "invalid_file", "integrity",        "file_access", "key_not_found",     "key_conflict", "layout",
      "closed",       "unsupported",      "program",     "method_not_found",  "input",        "missing_backend",
      "execution",    "unsupported_data", "update",      "adapter",           "output_path",  "data_changed",
      "training",     "not_finite_loss",  "invalid_key", "invalid_alignment", "release",      "trust",
      "transfer",     "checkpoint",
  };
  return kNames[static_cast<int>(kind)];
}

} // namespace

nb::object to_exception(const Error& error) {
  return call_python(
      helpers().make_error,
      nb::str(name_of(error.kind())),
      to_bytes(error.path()),
      to_bytes(error.reason()),
      nb::int_(error.number()));
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    try {
      const nb::object made = to_exception(error);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    } catch (nb::python_error& failed) {
      failed.restore();
    }
  }
}

} // namespace blobstore::python
