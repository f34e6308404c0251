// Unpredictable numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace blobstore::internal {

uint64_t random_word();

/// Hexadecimal digits, in lower case; at most 256.
std::string random_digits(size_t count);

} // namespace blobstore::internal
