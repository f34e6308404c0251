// Errors as values.
#pragma once

#include <new>
#include <type_traits>
#include <utility>

#include <blobstore/error.h>
#include <blobstore/result.h>

namespace blobstore::internal {

/// Made when the library is loaded, so that it needs no memory later.
extern const Error out_of_memory;

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
  } catch (Error& error) {
    return std::move(error);
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  }
}

} // namespace blobstore::internal
