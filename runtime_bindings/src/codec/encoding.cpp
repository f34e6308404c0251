#include "codec/encoding.h"

namespace blobstore::internal {
namespace {

/// Take a prefix from a text, if it is there.
bool take(std::string_view& text, std::string_view prefix) {
  if (text.substr(0, prefix.size()) != prefix) {
    return false;
  }
  text.remove_prefix(prefix.size());
  return true;
}

/// A digit that is one of these; 0 is none.
uint8_t digit_of(std::string_view text, std::string_view allowed) {
  return text.size() == 1 && allowed.find(text[0]) != std::string_view::npos ? static_cast<uint8_t>(text[0] - '0') : 0;
}

} // namespace

std::optional<Encoding> read_encoding(std::string_view text) {
  Encoding encoding;
  if (text == "raw") {
    return encoding;
  }
  if (take(text, "planes:")) {
    encoding.kind = Encoding::Kind::Planes;
    encoding.width = digit_of(text, "1248");
  } else if (take(text, "near:")) {
    encoding.kind = Encoding::Kind::Near;
    encoding.floating = take(text, "f");
    if (!encoding.floating && !take(text, "u")) {
      return std::nullopt;
    }
    encoding.width = digit_of(text.substr(0, 1), encoding.floating ? "248" : "1248");
    if (encoding.width == 0 || text.substr(1, 1) != ":") {
      return std::nullopt;
    }
    text.remove_prefix(2);
    encoding.bits = digit_of(text, "24");
    if (encoding.bits == 0 && text != "0") {
      return std::nullopt;
    }
  } else {
    return std::nullopt;
  }
  return encoding.width == 0 ? std::nullopt : std::optional(encoding);
}

} // namespace blobstore::internal
