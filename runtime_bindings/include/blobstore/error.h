// The exception class of this library. std::bad_alloc is the only other exception that its functions throw.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

/// What went wrong, in the distinctions that a handler makes. Each kind is one class in Python; the
/// native module calls it by the same name in lower case (`invalid_file`).
enum class ErrorKind {
  InvalidFile, // a file is not what it claims to be
  Integrity, // the structure of a file is sound, but its bytes are not what was written
  FileAccess, // the operating system refused access, or the file was truncated
  KeyNotFound,
  KeyConflict, // one key with two contents
  Layout, // a layout is impossible, or not the expected one
  Closed,
  Unsupported, // this cache or this mode cannot do it
  Program, // a program cannot be loaded
  MethodNotFound,
  Input, // the inputs have a wrong number, shape or type
  MissingBackend,
  Execution, // a method failed while it ran
  UnsupportedData, // the function does not take this tensor, dtype or value
  Update, // an update by name that is refused, incomplete or not finite
  Adapter, // an adapter of another foundation, incomplete, or in conflict
  OutputPath, // an output would replace an input or a protected file
  DataChanged, // memory or a file changed while it was used
  Training, // a training step is not possible
  NotFiniteLoss, // ... because the loss is infinite or NaN
  InvalidKey, // this key cannot be written to a file
  InvalidAlignment, // ... or this alignment, or not together with the others
  Release, // a release does not fit the folder or the device
  Trust, // ... or is not the expected one, or older than what is installed
  Transfer, // files of a release were not fetched yet
  Checkpoint, // a checkpoint does not belong to this program, optimizer or base
};

/// An error that names the file or key, what was expected and what was found.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& reason) : Error(kind, std::string(), reason) {}

  /// @param path the file that the error is about; `what()` begins with it.
  /// @param number errno for FileAccess, ExecuTorch's error number for Program and Execution, otherwise 0.
  Error(ErrorKind kind, std::string path, const std::string& reason, int number = 0)
      : std::runtime_error(path.empty() ? reason : path + ": " + reason),
        kind_(kind),
        path_(std::move(path)),
        reason_(reason),
        number_(number) {}
  ~Error() override;
  Error(const Error&) = default;
  Error(Error&&) = default;
  Error& operator=(const Error&) = default;
  Error& operator=(Error&&) = default;

  ErrorKind kind() const { return kind_; }
  const std::string& path() const { return path_; }
  const std::string& reason() const { return reason_; }
  int number() const { return number_; }

 private:
  ErrorKind kind_;
  std::string path_;
  std::string reason_;
  int number_;
};

} // namespace blobstore
