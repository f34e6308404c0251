// Mutations that readers do not refuse at once.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t most);

/// libFuzzer's own mutation, after which digests are mostly corrected, so that readers do not stop at them.
/// @param reseal corrects the digests of a file, if it finds them.
inline size_t mutate_sealed(
    uint8_t* data, size_t size, size_t most, unsigned int seed, void (*reseal)(uint8_t* data, size_t size)) {
  size = LLVMFuzzerMutate(data, size, most);
  if (seed % 4 != 0) {
    reseal(data, size);
  }
  return size;
}
