// The fields of JSON objects of releases, which are checked as they are read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include <blobstore/error.h>

#include "format/format_error.h"
#include "format/json.h"
#include "format/utf8.h"
#include "releases/object.h"

namespace blobstore::internal {

inline constexpr uint64_t kMostNumber = (uint64_t{1} << 53) - 1; // what every reader of JSON reads exactly
inline constexpr size_t kAnyNumber = SIZE_MAX; // of items

/// Every function throws FormatError if the next value is not what it reads.
class Fields {
 public:
  using Check = bool (*)(std::string_view);

  explicit Fields(std::string_view text) : json(text, "it") {}

  std::string text(const char* what, Check check);
  uint64_t number(const char* what, uint64_t least = 0, uint64_t most = kMostNumber);
  /// @param field reads the value of a field, or returns false if it does not know it.
  /// @param required those that must be there, each with a space behind it.
  void object(const char* what, std::string_view required, const std::function<bool(const std::string&)>& field);
  /// @param item reads the item of this position. @returns the number of items.
  size_t array(const char* what, size_t most, const std::function<void(size_t)>& item);
  /// An array whose items have a meaning each. @param most more than these are refused.
  void tuple(const char* what, size_t least, size_t most, const std::function<void(size_t)>& item);
  /// An object of a release: its digest, its size, and perhaps the folder that it lies in.
  ReleaseObject content(const char* what);
  bool flag(const char* what);
  void format_is(const char* wanted);

  JsonReader json;
};

/// Read something, and name the file in errors. @throws Error InvalidFile.
template <typename Read>
auto in_file(const std::string& bytes, const std::string& where, const char* what, Read read) {
  try {
    if (!is_utf8(bytes)) {
      throw_format_error("it is not UTF-8");
    }
    return read();
  } catch (const FormatError& error) {
    throw_error_in(ErrorKind::InvalidFile, where, "this is not {} of a release: {}", what, error.what());
  }
}

} // namespace blobstore::internal
