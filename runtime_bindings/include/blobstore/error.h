// The one kind of exception that this library throws.
#pragma once

#include <stdexcept>
#include <string>

namespace blobstore {

/// What went wrong, as far as a handler would care. Each kind is one class of blobstore/errors.py.
enum class ErrorKind {
  InvalidFile, // a file is not what it claims to be
  Integrity, // its structure is sound, its bytes are not what was written
  FileAccess, // the operating system refused
  KeyNotFound,
  KeyConflict, // one key, two contents
  Layout, // a layout that is impossible, or not the one that is expected
  Closed,
  Unsupported, // this cache or this mode cannot do that
  Program, // a program cannot be loaded
  MethodNotFound,
  Input, // wrong number, shape or type of inputs
  MissingBackend,
  Execution, // a method failed while it ran
};

/// An error that names the file or key, what was expected and what was found.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& reason) : Error(kind, std::string(), reason) {}

  /// @param path the file that the error is about; it is put in front of the reason.
  /// @param number errno for FileAccess, ExecuTorch's error number for Program and Execution, else 0.
  Error(ErrorKind kind, std::string path, const std::string& reason, int number = 0)
      : std::runtime_error(path.empty() ? reason : path + ": " + reason),
        kind_(kind),
        path_(std::move(path)),
        reason_(reason),
        number_(number) {}

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
