// Why bytes are not what they claim to be.
#pragma once

#include <stdexcept>

#include "os/text.h"

namespace blobstore::internal {

/// Callers that know the name of the file turn it into an Error.
class FormatError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void throw_format_shown(const char* reason, uint64_t kinds, const Shown* values);

/// Throw a FormatError with such a text as `format` makes.
template <typename... T>
[[noreturn]] BLOBSTORE_INLINE void throw_format_error(const char* reason, const T&... values) {
  const Shown all[] = {show(values)..., {}};
  throw_format_shown(reason, kShownKinds<T...>, all);
}

} // namespace blobstore::internal
