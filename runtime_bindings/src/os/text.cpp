#include "os/text.h"

#include <cstring>

namespace blobstore::internal {
namespace {

void append(std::string& text, uint64_t kind, Shown value) {
  switch (kind) {
    case kCharacters:
      text += static_cast<const char*>(value.text);
      break;
    case kString:
      text += *static_cast<const std::string*>(value.text);
      break;
    case kView:
      text += *static_cast<const std::string_view*>(value.text);
      break;
    case kSigned:
      text += std::to_string(static_cast<int64_t>(value.number));
      break;
    default:
      text += std::to_string(value.number);
  }
}

} // namespace

std::string format_shown(const char* text, uint64_t kinds, const Shown* values) {
  std::string made;
  for (; kinds != 0; kinds >>= kShownBits, ++values) {
    const char* place = std::strstr(text, "{}");
    made.append(text, place);
    append(made, kinds % (1 << kShownBits), *values);
    text = place + 2;
  }
  return made += text;
}

void throw_shown(ErrorKind kind, const std::string* path, const char* reason, uint64_t kinds, const Shown* values) {
  throw Error(kind, path != nullptr ? *path : std::string(), format_shown(reason, kinds, values));
}

void throw_errno(const std::string& path, int number) {
  throw Error(ErrorKind::FileAccess, path, std::strerror(number), number);
}

} // namespace blobstore::internal
