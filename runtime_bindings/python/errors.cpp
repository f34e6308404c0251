// The library's errors as Python exceptions, which the Python side makes.
#include <exception>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

/// The class of the Python side for a kind.
const char* name_of(ErrorKind kind) {
  constexpr const char* kNames[] = {
      "InvalidFileError", "IntegrityError",        "FileAccessError", "KeyNotFoundError",
      "KeyConflictError", "LayoutError",           "ClosedError",     "UnsupportedOperationError",
      "ProgramError",     "MethodNotFoundError",   "InputError",      "MissingBackendError",
      "ExecutionError",   "UnsupportedDataError",  "UpdateError",     "AdapterError",
      "OutputPathError",  "DataChangedError",      "TrainingError",   "NotFiniteLossError",
      "InvalidKeyError",  "InvalidAlignmentError", "ReleaseError",    "TrustError",
      "TransferError",    "CheckpointError",
  };
  return kNames[static_cast<int>(kind)];
}

} // namespace

nb::object to_exception(const Error& error) {
  return call_python(
      helpers().make_error,
      nb::str(name_of(error.kind())),
      nb::cast(RawText(error.path())),
      nb::cast(RawText(error.reason())),
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
