// Unpredictable numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace blobstore::internal {

uint32_t random_word();

/// Hexadecimal digits, in lower case.
std::string random_digits(size_t count);

} // namespace blobstore::internal
