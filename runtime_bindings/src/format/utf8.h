// Whether bytes are text.
#pragma once

#include <cstdint>
#include <string_view>

namespace blobstore::internal {

/// What may follow the first byte of a character.
struct Utf8Tail {
  unsigned bytes = 0; // 0 if no character begins with that byte
  uint8_t low = 0x80; // of the next byte; those behind it are 0x80 to 0xbf
  uint8_t high = 0xbf;
};

inline Utf8Tail utf8_tail(uint8_t first) {
  if (first >= 0xc2 && first <= 0xdf) {
    return {1};
  }
  if (first >= 0xe0 && first <= 0xef) {
    return {2, static_cast<uint8_t>(first == 0xe0 ? 0xa0 : 0x80), static_cast<uint8_t>(first == 0xed ? 0x9f : 0xbf)};
  }
  if (first >= 0xf0 && first <= 0xf4) {
    return {3, static_cast<uint8_t>(first == 0xf0 ? 0x90 : 0x80), static_cast<uint8_t>(first == 0xf4 ? 0x8f : 0xbf)};
  }
  return {};
}

/// Whether text is UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) {
  const auto* at = reinterpret_cast<const uint8_t*>(text.data());
  const uint8_t* end = at + text.size();
  while (at < end) {
    const uint8_t first = *at++;
    if (first < 0x80) {
      continue;
    }
    Utf8Tail tail = utf8_tail(first);
    if (tail.bytes == 0) {
      return false;
    }
    for (; tail.bytes > 0; tail = {tail.bytes - 1}) {
      if (at == end || *at < tail.low || *at > tail.high) {
        return false;
      }
      ++at;
    }
  }
  return true;
}

} // namespace blobstore::internal
