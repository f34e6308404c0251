// Calls of the system that signals interrupt.
#pragma once

#include <cerrno>

namespace blobstore::internal {

/// Call a function of the system again while signals interrupt it.
template <typename Call>
auto uninterrupted(Call call) {
  decltype(call()) result;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

} // namespace blobstore::internal
