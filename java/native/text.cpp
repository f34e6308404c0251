#include "text.h"

#include <cstdint>
#include <string_view>

#include <blobstore/error.h>

#include "format/utf8.h"

namespace blobstore::java {
namespace {

constexpr uint32_t kBeyondPlane = 0x10000; // characters from here on are surrogate pairs

struct Character {
  uint32_t code;
  size_t length; // in bytes
};

bool is_surrogate(uint32_t code) {
  return code >= 0xD800 && code < 0xE000;
}

/// The character at the beginning of a text, or U+FFFD for one byte.
Character first_of(std::string_view text) {
  const auto first = static_cast<uint8_t>(text[0]);
  const size_t more = internal::utf8_tail(first).bytes;
  if (text.size() <= more || !internal::is_utf8(text.substr(0, more + 1))) {
    return {0xFFFD, 1};
  }
  uint32_t code = more == 0 ? first : first & (0x3FU >> more);
  for (size_t i = 1; i <= more; ++i) {
    code = (code << 6) | (static_cast<uint8_t>(text[i]) & 0x3F);
  }
  return {code, more + 1};
}

} // namespace

std::u16string to_utf16(const std::string& text) {
  std::u16string out;
  out.reserve(text.size());
  for (std::string_view rest = text; !rest.empty();) {
    const Character next = first_of(rest);
    rest.remove_prefix(next.length);
    if (next.code < kBeyondPlane) {
      out += static_cast<char16_t>(next.code);
    } else {
      out += static_cast<char16_t>(0xD800 + ((next.code - kBeyondPlane) >> 10));
      out += static_cast<char16_t>(0xDC00 + ((next.code - kBeyondPlane) & 0x3FF));
    }
  }
  return out;
}

std::string to_utf8(const std::u16string& text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size(); ++at) {
    uint32_t code = text[at];
    if (is_surrogate(code)) {
      const uint32_t low = at + 1 < text.size() ? text[at + 1] : 0;
      if (code >= 0xDC00 || low < 0xDC00 || low >= 0xE000) {
        throw Error(ErrorKind::UnsupportedData, "a string has half of a surrogate pair");
      }
      code = kBeyondPlane + ((code - 0xD800) << 10) + (low - 0xDC00);
      ++at;
    }
    internal::append_utf8(out, code);
  }
  return out;
}

} // namespace blobstore::java
