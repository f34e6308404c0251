// Content addresses: xxh3-128, seed 0, canonical (big-endian) order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace blobstore::internal {

using Digest = std::array<uint8_t, 16>;

Digest digest(const void* data, size_t size);

/// A digest of bytes that come in pieces.
class Hasher {
 public:
  Hasher();
  void update(const void* data, size_t size);
  Digest digest() const;

 private:
  std::unique_ptr<void, void (*)(void*)> state_;
};

/// Two lower case digits a byte.
std::string hexadecimal(const uint8_t* bytes, size_t size);

/// In hexadecimal, for messages.
std::string to_string(const Digest& digest);

} // namespace blobstore::internal
