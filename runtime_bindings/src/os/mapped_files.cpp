#include "os/mapped_files.h"

#include <cinttypes>
#include <cstdio>
#include <fstream>

namespace blobstore::internal {

std::vector<std::optional<MappedFile>> mapped_files(const std::vector<const void*>& addresses) {
  std::vector<std::optional<MappedFile>> found(addresses.size());
  std::ifstream maps("/proc/self/maps"); // cannot be opened where there is none
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t inode = 0;
    char device[32] = {};
    int path = 0;
    // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel wrote the numbers
    if (std::sscanf(
            line.c_str(), "%" SCNx64 "-%" SCNx64 " %*s %*s %31s %" SCNu64 " %n", &begin, &end, device, &inode, &path) !=
            4 ||
        inode == 0) {
      continue;
    }
    for (size_t i = 0; i < addresses.size(); ++i) {
      const auto at = reinterpret_cast<uintptr_t>(addresses[i]);
      if (at >= begin && at < end) {
        found[i] = MappedFile{device, inode, path > 0 ? line.substr(static_cast<size_t>(path)) : ""};
      }
    }
  }
  return found;
}

} // namespace blobstore::internal
