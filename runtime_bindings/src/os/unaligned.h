// Numbers in memory, wherever they lie.
#pragma once

#include <cstdint>
#include <cstring>

namespace blobstore::internal {

/// A number whose bytes need not be aligned.
template <typename Number>
Number load(const uint8_t* from) {
  Number number;
  std::memcpy(&number, from, sizeof number);
  return number;
}
template <typename Number>
void store(uint8_t* to, Number number) {
  std::memcpy(to, &number, sizeof number);
}

} // namespace blobstore::internal
