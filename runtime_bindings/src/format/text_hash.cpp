#include "format/text_hash.h"

#include <cstdint>
#include <random>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace blobstore::internal {
namespace {

uint64_t random_seed() {
  std::random_device random;
  return static_cast<uint64_t>(random()) << 32 | random();
}

} // namespace

size_t TextHash::operator()(std::string_view text) const {
  static const uint64_t seed = random_seed();
  return static_cast<size_t>(XXH3_64bits_withSeed(text.data(), text.size(), seed));
}

} // namespace blobstore::internal
