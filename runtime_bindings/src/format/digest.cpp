#include "format/digest.h"

#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace blobstore::internal {

Digest digest(const void* data, size_t size) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
  Digest out;
  static_assert(sizeof(canonical.digest) == sizeof(out));
  std::memcpy(out.data(), canonical.digest, out.size());
  return out;
}

std::string to_string(const Digest& digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

} // namespace blobstore::internal
