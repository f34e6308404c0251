// The only source that has zstd in it. Its internals have C++ names here, and its functions none that others see, so
// that an application may link a zstd of its own.
#include "codec/zstd.h"

#include <new>
#include <string>

#include "format/format_error.h"

#if defined(BLOBSTORE_ZSTD_BUNDLED)
#define ZSTDLIB_VISIBLE static
#define ZSTDERRORLIB_VISIBLE static
#define g_debuglevel blobstore_zstd_debug_level // the only name of C
#include <zstddeclib.c> // NOLINT(bugprone-suspicious-include): all of zstd's decoder, as one source
#elif defined(BLOBSTORE_ZSTD)
#include <zstd.h>
#endif

namespace blobstore::internal {

#ifdef BLOBSTORE_ZSTD

const char* zstd_version() {
  return ZSTD_versionString();
}

uint64_t size_in_frame(const uint8_t* frame, size_t size) {
  const unsigned long long found = ZSTD_getFrameContentSize(frame, size);
  if (found == ZSTD_CONTENTSIZE_ERROR || found == ZSTD_CONTENTSIZE_UNKNOWN) {
    throw FormatError("a zstd frame that does not say how many bytes it holds");
  }
  return found;
}

void Decompressor::Free::operator()(void* context) const {
  ZSTD_freeDCtx(static_cast<ZSTD_DCtx*>(context));
}

void Decompressor::decompress(const uint8_t* frame, size_t size, uint8_t* out, size_t expected) {
  // before anything is written; an empty stream is never stored as a frame
  if (expected == 0 || ZSTD_getFrameContentSize(frame, size) != expected) {
    throw FormatError("a stream that does not hold " + std::to_string(expected) + " bytes");
  }
  if (!context_) {
    context_.reset(ZSTD_createDCtx());
    if (!context_) {
      throw std::bad_alloc();
    }
  }
  if (ZSTD_findFrameCompressedSize(frame, size) != size) {
    throw FormatError("a stream of " + std::to_string(size) + " bytes that are not one zstd frame");
  }
  const size_t done = ZSTD_decompressDCtx(static_cast<ZSTD_DCtx*>(context_.get()), out, expected, frame, size);
  if (ZSTD_isError(done) != 0) {
    throw FormatError("a stream: error " + std::to_string(0 - done) + " of zstd");
  }
  if (done != expected) {
    throw FormatError("a stream of " + std::to_string(done) + " bytes, expected " + std::to_string(expected));
  }
}

#else

const char* zstd_version() {
  return nullptr;
}

uint64_t size_in_frame(const uint8_t* /*frame*/, size_t /*size*/) {
  throw FormatError("it is a zstd frame, and this library was built without zstd (BLOBSTORE_ZSTD)");
}

void Decompressor::Free::operator()(void* /*context*/) const {}

void Decompressor::decompress(const uint8_t* /*frame*/, size_t /*size*/, uint8_t* /*out*/, size_t /*expected*/) {
  throw FormatError("a stream is a zstd frame, and this library was built without zstd (BLOBSTORE_ZSTD)");
}

#endif

} // namespace blobstore::internal
