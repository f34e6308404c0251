// zstd frames, as far as this build has zstd.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace blobstore::internal {

/// By which frames are read; null without one.
const char* zstd_version();

/// The bytes that a frame says it holds. @throws FormatError if these bytes do not begin a frame that says so, or if
/// there is no zstd here.
uint64_t size_in_frame(const uint8_t* frame, size_t size);

/// For one thread. Memory is taken for the first frame.
class Decompressor {
 public:
  /// Write the one frame that these bytes are.
  /// @param out room for `expected` bytes.
  /// @throws FormatError if they are something else, or hold another number of bytes, or if there is no zstd here.
  void decompress(const uint8_t* frame, size_t size, uint8_t* out, size_t expected);

 private:
  struct Free {
    void operator()(void* context) const;
  };
  std::unique_ptr<void, Free> context_;
};

} // namespace blobstore::internal
