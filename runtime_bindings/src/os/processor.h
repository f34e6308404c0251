// What the library asks of the processor.
#pragma once

// BLOBSTORE_AVX2 goes before a function that is compiled for the vectors of AVX2, and may be called if has_avx2().
// Elsewhere, the compiler's default has the vectors that the processor is known to have.
#if defined(__x86_64__)
#define BLOBSTORE_AVX2 __attribute__((target("avx2")))
#else
#define BLOBSTORE_AVX2
#endif

// Before a function that is compiled as a part of each of its callers.
#define BLOBSTORE_INLINE inline __attribute__((always_inline))

namespace blobstore::internal {

inline bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

} // namespace blobstore::internal
