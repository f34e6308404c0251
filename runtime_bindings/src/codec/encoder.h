// The bytes to store for a blob.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "codec/decoder.h"
#include "codec/encoding.h"
#include "codec/zstd.h"

namespace blobstore::internal {

/// Encodes chunks, one after the other, in one thread.
class ChunkEncoder {
 public:
  /// What an encoding makes of a chunk, with its length in front; valid until the next call.
  /// @param encoding other than raw.
  /// @param chunk at most kChunk bytes.
  /// @param base as many bytes, for an encoding against a base.
  /// @throws std::bad_alloc
  Bytes encode(const Encoding& encoding, Bytes chunk, const uint8_t* base);

 private:
  void stream(const uint8_t* data, size_t size);
  template <typename T>
  void split(const uint8_t* elements, size_t count);
  template <typename T, bool kFloating>
  void near(const Encoding& encoding, const uint8_t* elements, const uint8_t* base, size_t count);
  template <typename T, unsigned kBits>
  size_t pack(uint8_t* numbers, size_t count);

  Compressor compressor_;
  std::unique_ptr<uint8_t[]> out_;
  std::unique_ptr<uint8_t[]> plane_; // one plane, or codes
  std::unique_ptr<uint8_t[]> numbers_;
  size_t end_ = 0;
};

} // namespace blobstore::internal
