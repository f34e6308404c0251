#include "format/text_hash.h"

#include <cstdint>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "os/random.h"

namespace blobstore::internal {

size_t TextHash::operator()(std::string_view text) const {
  static const uint64_t seed = random_word();
  return static_cast<size_t>(XXH3_64bits_withSeed(text.data(), text.size(), seed));
}

} // namespace blobstore::internal
