// Whether bytes are text.
#pragma once

#include <cstdint>
#include <string_view>

namespace blobstore::internal {

/// Whether text is UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) {
  const auto* at = reinterpret_cast<const uint8_t*>(text.data());
  const uint8_t* end = at + text.size();
  while (at < end) {
    const uint8_t first = *at++;
    if (first < 0x80) {
      continue;
    }
    unsigned more = 0;
    uint8_t low = 0x80;
    uint8_t high = 0xbf;
    if (first >= 0xc2 && first <= 0xdf) {
      more = 1;
    } else if (first >= 0xe0 && first <= 0xef) {
      more = 2;
      low = first == 0xe0 ? 0xa0 : low;
      high = first == 0xed ? 0x9f : high;
    } else if (first >= 0xf0 && first <= 0xf4) {
      more = 3;
      low = first == 0xf0 ? 0x90 : low;
      high = first == 0xf4 ? 0x8f : high;
    } else {
      return false;
    }
    for (; more > 0; --more, low = 0x80, high = 0xbf) {
      if (at == end || *at < low || *at > high) {
        return false;
      }
      ++at;
    }
  }
  return true;
}

} // namespace blobstore::internal
