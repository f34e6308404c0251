// A value or an error, for applications that are compiled without exceptions; see <blobstore/nothrow.h>.
#pragma once

#include <optional>
#include <utility>

#include <blobstore/error.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

template <typename T>
class Result;

/// Whether something was done. Owns the error.
template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}

  bool ok() const { return !error_; }
  explicit operator bool() const { return ok(); }
  /// The error: `kind()`, `what()`, `path()`, `number()`. Ends the process if there is a value instead.
  const Error& error() const {
    if (ok()) {
      end_on_misuse(nullptr);
    }
    return *error_;
  }

 protected:
  /// Ends the process if there is an error.
  void check() const {
    if (!ok()) {
      end_on_misuse(&*error_);
    }
  }

 private:
  /// Ends the process with a message. @param error the error of a Result without value; null if it has a value.
  [[noreturn]] static void end_on_misuse(const Error* error) noexcept;

  std::optional<Error> error_;
};

/// A value, or the error that prevented it. Owns both.
template <typename T>
class [[nodiscard]] Result : public Result<void> {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Error error) : Result<void>(std::move(error)) {}

  /// The value. Ends the process if there is an error instead; call `ok` first.
  T& get() & {
    check();
    return *value_;
  }
  const T& get() const& {
    check();
    return *value_;
  }
  T get() && {
    check();
    return std::move(*value_);
  }
  T& operator*() & { return get(); }
  const T& operator*() const& { return get(); }
  T operator*() && { return std::move(*this).get(); }
  T* operator->() { return &get(); }
  const T* operator->() const { return &get(); }

 private:
  std::optional<T> value_;
};

} // namespace blobstore
