// Where paths lead.
#pragma once

#include <string>

namespace blobstore::internal {

/// The absolute path that a path leads to, through all links. The file need not exist. If its folder does not exist
/// either, or links lead in a circle, the path itself.
std::string real_path(const std::string& path);

/// Whether two paths lead to the same file, or would if it existed.
bool same_file(const std::string& a, const std::string& b);

/// What a link holds; empty if the path is not a link.
std::string link_target(const std::string& path);

/// The folder of an absolute path, with the separator at its end.
inline std::string folder_of(const std::string& path) {
  return path.substr(0, path.rfind('/') + 1);
}

} // namespace blobstore::internal
