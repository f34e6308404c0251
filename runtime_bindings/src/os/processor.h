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

#if defined(__x86_64__)
/// Set when the library is loaded. __builtin_cpu_supports would bring in code that looks for each feature of each
/// processor.
extern const bool kHasAvx2;
#else
constexpr bool kHasAvx2 = false;
#endif

/// Whether the processor has AVX2, and the system keeps its registers.
inline bool has_avx2() {
  return kHasAvx2;
}

} // namespace blobstore::internal
