// The bytes of contents that are stored encoded, which blobstore/pool/codec.py describes. What is decoded comes from
// servers; who calls this compares it with its digest. Here sizes are checked, before memory is taken.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

namespace blobstore::internal {

/// How a content is stored.
struct Encoding {
  enum class Kind { Raw, Planes, Near };
  Kind kind = Kind::Raw;
  uint8_t width = 1; // bytes of an element
  bool floating = false; // elements are ordered by their value as floats
  uint8_t bits = 0; // of each number, in the first stream; 0 if there is no such stream
};

/// @returns empty for an encoding that `decode` does not know.
std::optional<Encoding> read_encoding(std::string_view text);

/// Decode a content, a chunk at a time: that takes about six megabytes, whatever its size.
///
/// @param size bytes of the content.
/// @param stored bytes that it is stored in.
/// @param read fills a place with bytes of what is stored, from a byte on that is given last.
/// @param base the same for the content that this one is a difference to, which has its size; not called for others.
/// @param use called with the bytes of the content, in order.
/// @throws FormatError: it is not stored so.
void decode(
    const Encoding& encoding,
    uint64_t size,
    uint64_t stored,
    const std::function<void(uint8_t*, size_t, uint64_t)>& read,
    const std::function<void(uint8_t*, size_t, uint64_t)>& base,
    const std::function<void(const uint8_t*, size_t)>& use);

} // namespace blobstore::internal
