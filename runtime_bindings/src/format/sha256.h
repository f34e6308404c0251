// SHA-256 (FIPS 180-4), by which releases name their files.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace blobstore::internal {

/// A digest of bytes that come in pieces.
class Sha256 {
 public:
  void update(const void* data, size_t size);
  /// In lower case hexadecimal digits. Call once, at the end.
  std::string finish();

 private:
  void block(const uint8_t* data);

  std::array<uint32_t, 8> state_ = {
      0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> kept_{}; // bytes that are not a whole block yet
  uint64_t size_ = 0;
};

std::string sha256(const void* data, size_t size);

} // namespace blobstore::internal
