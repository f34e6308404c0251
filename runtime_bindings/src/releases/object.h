// What a release consists of, named by contents.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace blobstore::internal {

inline bool is_sha256(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

/// Immutable bytes, named by their SHA-256.
struct ReleaseObject {
  std::string sha256;
  uint64_t size = 0;
  bool packed = false; // it is a pack of a pool, in the folder of these

  /// Where it is below a release folder.
  std::string path() const { return packed ? "packs/" + sha256.substr(0, 2) + "/" + sha256 : "files/" + sha256; }
};

} // namespace blobstore::internal
