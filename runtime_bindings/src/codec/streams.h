// What encoding makes of a blob before zstd. For Python, which compresses it; devices decode.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "codec/decoder.h"
#include "codec/encoding.h"

namespace blobstore::internal {

/// Splits chunks into streams, one after the other, in one thread.
class ChunkSplitter {
 public:
  /// The streams of a chunk, in order; valid until the next call, and as long as the chunk.
  /// @param encoding other than raw.
  /// @param chunk at most kChunk bytes.
  /// @param base as many bytes, for an encoding against a base.
  /// @throws std::bad_alloc
  const std::vector<Bytes>& split(const Encoding& encoding, Bytes chunk, const uint8_t* base);

 private:
  template <typename T>
  void add_planes(const uint8_t* elements, size_t count);
  template <typename T, bool kFloating>
  void add_differences(const Encoding& encoding, const uint8_t* elements, const uint8_t* base, size_t count);
  template <typename T, unsigned kBits>
  size_t add_codes(size_t count);

  std::vector<Bytes> streams_;
  std::unique_ptr<uint8_t[]> room_; // codes and planes
  std::unique_ptr<uint8_t[]> numbers_;
  size_t end_ = 0; // of what is in the room
};

} // namespace blobstore::internal
