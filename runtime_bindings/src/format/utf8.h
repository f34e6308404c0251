// Bytes as text, and text as bytes.
#pragma once

#include <cstdint>
#include <string>
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

/// @param code of a character; at most 0x1fffff.
inline void append_utf8(std::string& text, uint32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  constexpr uint8_t kFirst[] = {0, 0xc0, 0xe0, 0xf0};
  text += static_cast<char>(kFirst[more] | code >> 6 * more);
  for (int i = more - 1; i >= 0; --i) {
    text += static_cast<char>(0x80 | (code >> 6 * i & 0x3f));
  }
}

} // namespace blobstore::internal
