#include "text.h"

#include <cstdint>
#include <string_view>

#include <blobstore/error.h>

namespace blobstore::java {
namespace {

/// How a character of one to four bytes begins.
struct Form {
  uint8_t mask;
  uint8_t lead; // the first byte under the mask
  uint32_t least; // smaller numbers have a shorter form
};
constexpr Form kForms[] = {{0x80, 0x00, 0}, {0xE0, 0xC0, 0x80}, {0xF0, 0xE0, 0x800}, {0xF8, 0xF0, 0x10000}};

constexpr uint32_t kLast = 0x10FFFF;
constexpr uint32_t kBeyondPlane = 0x10000; // characters from here on are surrogate pairs

struct Character {
  uint32_t code;
  size_t length; // in bytes
};

bool is_surrogate(uint32_t code) {
  return code >= 0xD800 && code < 0xE000;
}

/// The number in a character of this form; one that is no character if its bytes are not all there.
uint32_t number(std::string_view text, const Form& form, size_t length) {
  uint32_t code = static_cast<uint8_t>(text[0]) & ~form.mask & 0xFFU;
  for (size_t i = 1; i < length; ++i) {
    if (i >= text.size() || (static_cast<uint8_t>(text[i]) & 0xC0) != 0x80) {
      return kLast + 1;
    }
    code = (code << 6) | (static_cast<uint8_t>(text[i]) & 0x3F);
  }
  return code;
}

/// The character at the beginning of a text, or U+FFFD for one byte.
Character first_of(std::string_view text) {
  for (size_t length = 1; length <= 4; ++length) {
    const Form& form = kForms[length - 1];
    if ((static_cast<uint8_t>(text[0]) & form.mask) == form.lead) {
      const uint32_t code = number(text, form, length);
      if (code >= form.least && code <= kLast && !is_surrogate(code)) {
        return {code, length};
      }
    }
  }
  return {0xFFFD, 1};
}

void append(std::string& out, uint32_t code) {
  size_t length = 4;
  while (length > 1 && code < kForms[length - 1].least) {
    --length;
  }
  size_t shift = 6 * (length - 1);
  out += static_cast<char>(kForms[length - 1].lead | (code >> shift));
  while (shift != 0) {
    shift -= 6;
    out += static_cast<char>(0x80 | ((code >> shift) & 0x3F));
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
