// The only source that has zstd in it. Its internals have C++ names here, and its functions none that others see, so
// that an application may link a zstd of its own.
#include "codec/zstd.h"

#include <new>
#include <string>

#include "format/format_error.h"

#if defined(BLOBSTORE_ZSTD_BUNDLED)
#define ZSTDLIB_VISIBLE static
#define ZSTDERRORLIB_VISIBLE static
#define ZDICTLIB_VISIBLE static
#define ZSTD_ASAN_DONT_POISON_WORKSPACE 1 // which declares functions of C that have C++ names here
#define g_debuglevel blobstore_zstd_debug_level // the only name of C
#include <zstd.c> // NOLINT(bugprone-suspicious-include): all of zstd, as one source
#elif defined(BLOBSTORE_ZSTD)
#include <zstd.h>
#endif

namespace blobstore::internal {

#ifdef BLOBSTORE_ZSTD
namespace {

constexpr int kLevel = 1; // a higher one is slower and hardly smaller

} // namespace

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
    throw FormatError(std::string("a stream: zstd: ") + ZSTD_getErrorName(done));
  }
  if (done != expected) {
    throw FormatError("a stream of " + std::to_string(done) + " bytes, expected " + std::to_string(expected));
  }
}

void Compressor::Free::operator()(void* context) const {
  ZSTD_freeCCtx(static_cast<ZSTD_CCtx*>(context));
}

size_t Compressor::bound(size_t size) {
  return ZSTD_compressBound(size);
}

size_t Compressor::compress(const uint8_t* data, size_t size, uint8_t* out) {
  if (!context_) {
    context_.reset(ZSTD_createCCtx());
    if (!context_) {
      throw std::bad_alloc();
    }
  }
  const size_t done = ZSTD_compressCCtx(static_cast<ZSTD_CCtx*>(context_.get()), out, bound(size), data, size, kLevel);
  if (ZSTD_isError(done) != 0) { // there is room, so it found no memory
    throw std::bad_alloc();
  }
  return done;
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

void Compressor::Free::operator()(void* /*context*/) const {}

size_t Compressor::bound(size_t size) {
  return size;
}

size_t Compressor::compress(const uint8_t* /*data*/, size_t /*size*/, uint8_t* /*out*/) {
  return 0;
}

#endif

} // namespace blobstore::internal
