// What the library asks of the processor.
#pragma once

// BLOBSTORE_AVX2 goes before a function that is compiled for the vectors of AVX2, and may be called if has_avx2().
// Elsewhere, the compiler's default has the vectors that the processor is known to have. BLOBSTORE_FMA and has_fma()
// are the same for AVX2 with instructions that multiply and add with one rounding.
#if defined(__x86_64__)
#define BLOBSTORE_AVX2 __attribute__((target("avx2")))
#define BLOBSTORE_FMA __attribute__((target("avx2,fma")))
#else
#define BLOBSTORE_AVX2
#define BLOBSTORE_FMA
#endif

// Before a function that is compiled as a part of each of its callers.
#define BLOBSTORE_INLINE inline __attribute__((always_inline))

namespace blobstore::internal {

#if defined(__x86_64__)
/// Set when the library is loaded. __builtin_cpu_supports would bring in code that looks for each feature of each
/// processor.
extern const bool kHasAvx2;
extern const bool kHasFma;
#else
constexpr bool kHasAvx2 = false;
constexpr bool kHasFma = false;
#endif

/// Whether the processor has AVX2, and the system keeps its registers.
inline bool has_avx2() {
  return kHasAvx2;
}

inline bool has_fma() {
  return kHasFma;
}

} // namespace blobstore::internal
