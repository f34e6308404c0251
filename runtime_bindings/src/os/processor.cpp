#include "os/processor.h"

#if defined(__x86_64__)

#include <cpuid.h>

namespace blobstore::internal {
namespace {

/// @param more bits of leaf 1 that must be set, too.
bool find_avx2(unsigned more) {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  const unsigned needed = bit_OSXSAVE | bit_AVX | more;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & needed) != needed) {
    return false;
  }
  __asm__("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0)); // what the system keeps: bit 1 is SSE, bit 2 is AVX
  constexpr unsigned kKept = 0b110;
  return (eax & kKept) == kKept && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (ebx & bit_AVX2) != 0;
}

} // namespace

const bool kHasAvx2 = find_avx2(0);
const bool kHasFma = find_avx2(bit_FMA);

} // namespace blobstore::internal

#endif
