// Encoded blobs, back to their bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "codec/encoding.h"
#include "codec/zstd.h"

namespace blobstore::internal {

/// Bytes that somebody else has.
struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

/// Decodes chunks, one after the other, in one thread. It has room for one chunk, whatever the bytes say.
class ChunkDecoder {
 public:
  /// Write a chunk.
  /// @param encoding other than raw.
  /// @param body what the encoding made of the chunk, without its length.
  /// @param base as many bytes as the chunk has, for an encoding against a base.
  /// @param out room for them, apart from the base.
  /// @param size at most kChunk.
  /// @throws FormatError if the body is not a chunk of this size in this encoding.
  void decode(const Encoding& encoding, Bytes body, const uint8_t* base, uint8_t* out, size_t size);

 private:
  class Streams;

  template <typename T>
  void join(Streams& streams, uint8_t* out, size_t count);
  template <typename T, bool kFloating>
  void near(Streams& streams, const Encoding& encoding, const uint8_t* base, uint8_t* out, size_t size);

  Decompressor decompressor_;
  std::unique_ptr<uint8_t[]> room_;
};

/// Decode a blob, a chunk at a time: that takes less than seven megabytes, whatever its size.
/// @param size bytes of the blob.
/// @param stored bytes that it is stored in.
/// @param read fills a place with bytes of what is stored, from a byte on that is given last.
/// @param base the same for the base, which has `size` bytes; called only for an encoding against one.
/// @param use called with the bytes of the blob, in order.
/// @throws FormatError if the stored bytes are not a blob of this size in this encoding.
void decode(
    const Encoding& encoding,
    uint64_t size,
    uint64_t stored,
    const std::function<void(uint8_t*, size_t, uint64_t)>& read,
    const std::function<void(uint8_t*, size_t, uint64_t)>& base,
    const std::function<void(const uint8_t*, size_t)>& use);

} // namespace blobstore::internal
