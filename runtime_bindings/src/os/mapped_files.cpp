#include "os/mapped_files.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "os/system_text.h"

namespace blobstore::internal {
namespace {

/// A line of /proc/self/maps.
struct Line {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t offset = 0;
  uint64_t inode = 0;
  char permissions[8] = {};
  char device[32] = {};
  std::string path;
};

/// Call a function for each map of a file. Without /proc, no map is known.
template <typename Function>
void for_each_map(Function function) {
  const std::string maps = system_text("/proc/self/maps");
  for (size_t begin = 0; begin < maps.size();) {
    const size_t end = std::min(maps.find('\n', begin), maps.size());
    const std::string text = maps.substr(begin, end - begin);
    begin = end + 1;
    Line line;
    int path = 0;
    // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel wrote the numbers
    const int found = std::sscanf(
        text.c_str(),
        "%" SCNx64 "-%" SCNx64 " %7s %" SCNx64 " %31s %" SCNu64 " %n",
        &line.begin,
        &line.end,
        line.permissions,
        &line.offset,
        line.device,
        &line.inode,
        &path);
    if (found == 6 && line.inode != 0) {
      line.path = path > 0 ? text.substr(static_cast<size_t>(path)) : "";
      function(line);
    }
  }
}

} // namespace

std::vector<uint8_t*> shared_maps_of(const File& file) {
  const FileStatus status = file.status();
  std::vector<uint8_t*> found;
  for_each_map([&](const Line& line) {
    if (line.inode == status.inode && line.offset == 0 && line.permissions[3] == 's') {
      found.push_back(reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(line.begin)));
    }
  });
  return found;
}

std::vector<std::optional<MappedFile>> mapped_files(const std::vector<const void*>& addresses) {
  std::vector<std::optional<MappedFile>> found(addresses.size());
  for_each_map([&](const Line& line) {
    for (size_t i = 0; i < addresses.size(); ++i) {
      const auto at = reinterpret_cast<uintptr_t>(addresses[i]);
      if (at >= line.begin && at < line.end) {
        found[i] = MappedFile{line.device, line.inode, line.path};
      }
    }
  });
  return found;
}

} // namespace blobstore::internal
