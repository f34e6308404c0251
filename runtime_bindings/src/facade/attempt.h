// Errors as values.
#pragma once

#include <type_traits>
#include <utility>

#include <blobstore/error.h>
#include <blobstore/result.h>

namespace blobstore::internal {

/// The error that is being handled, as a value. Any other exception than those of this library ends the process.
Error caught() noexcept;

/// Call a function of this library and return its value or its error. Any other exception ends the process.
template <typename Function>
auto attempt(Function&& function) noexcept -> Result<decltype(function())> {
  try {
    if constexpr (std::is_void_v<decltype(function())>) {
      function();
      return {};
    } else {
      return function();
    }
  } catch (...) {
    return caught();
  }
}

} // namespace blobstore::internal

/// The body of a function of nothrow.h; see there.
#define BLOBSTORE_ATTEMPT(...)                                          \
  {                                                                     \
    return ::blobstore::internal::attempt([&] { return __VA_ARGS__; }); \
  }
