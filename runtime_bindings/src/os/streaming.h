// Streaming stores: writing much memory that nobody reads soon, past the caches of the processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace blobstore::internal {

/// Runs at least as large are streamed. An ordinary store first reads the line that it writes, and replaces another one
/// in the caches; what is smaller may still be there when a program reads it.
constexpr size_t kWorthStreaming = size_t{1} << 20; // bytes

#if defined(__SSE2__)
constexpr bool kStreams = true;
constexpr size_t kStreamed = sizeof(__m128i); // bytes of a store, which begins at a multiple of it

/// Write whole stores. Other threads see them after `end_streaming`. @param to aligned; @param from may be unaligned.
inline void stream(uint8_t* to, const uint8_t* from, size_t size) {
  for (size_t at = 0; at < size; at += kStreamed) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
}
inline void end_streaming() {
  _mm_sfence();
}
#else // not measured on other processors
constexpr bool kStreams = false;
constexpr size_t kStreamed = 1;

inline void stream(uint8_t* to, const uint8_t* from, size_t size) {
  std::memcpy(to, from, size);
}
inline void end_streaming() {}
#endif

/// As memcpy. Large runs are streamed.
inline void stream_copy(uint8_t* to, const uint8_t* from, size_t size) {
  if (!kStreams || size < kWorthStreaming) {
    std::memcpy(to, from, size);
    return;
  }
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kStreamed;
  const size_t inner = (size - head) / kStreamed * kStreamed;
  std::memcpy(to, from, head);
  stream(to + head, from + head, inner);
  end_streaming();
  std::memcpy(to + head + inner, from + head + inner, size - head - inner);
}

} // namespace blobstore::internal
