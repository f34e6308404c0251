#include "text.h"

#include <cstdint>
#include <string_view>

#include <blobstore/error.h>

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

/// How many bytes a character has.
size_t length_of(uint32_t code) {
  return code < 0x80 ? 1 : code < 0x800 ? 2 : code < kBeyondPlane ? 3 : 4;
}

/// The character at the beginning of a text, in the one form that Unicode has for it; U+FFFD for one byte if there is
/// none.
Character first_of(std::string_view text) {
  constexpr Character kNone{0xFFFD, 1};
  const auto first = static_cast<uint8_t>(text[0]);
  if (first < 0x80) {
    return {first, 1};
  }
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (first < 0xC0 || first >= 0xF8 || text.size() < length) {
    return kNone;
  }
  uint32_t code = first & (0x7FU >> length);
  for (size_t i = 1; i < length; ++i) {
    const auto next = static_cast<uint8_t>(text[i]);
    if (next >> 6 != 2) {
      return kNone;
    }
    code = (code << 6) | (next & 0x3F);
  }
  return code > 0x10FFFF || is_surrogate(code) || length_of(code) != length ? kNone : Character{code, length};
}

void append(std::string& text, uint32_t code) {
  const size_t length = length_of(code);
  if (length == 1) {
    text += static_cast<char>(code);
    return;
  }
  text += static_cast<char>((0xF00U >> length & 0xFF) | code >> 6 * (length - 1));
  for (size_t left = length - 1; left-- > 0;) {
    text += static_cast<char>(0x80 | (code >> 6 * left & 0x3F));
  }
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
    append(out, code);
  }
  return out;
}

} // namespace blobstore::java
