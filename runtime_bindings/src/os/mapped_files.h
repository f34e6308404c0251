// Which file lies behind mapped memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "os/file.h"

namespace blobstore::internal {

struct MappedFile {
  std::string device;
  uint64_t inode = 0;
  std::string path;

  bool operator==(const MappedFile& other) const { return device == other.device && inode == other.inode; }
};

/// Where this process maps a file from its first byte on, as shared memory. Empty if this system does not say.
std::vector<uint8_t*> shared_maps_of(const File& file);

/// For each address the file that is mapped there; empty if none is, or if this system does not say.
std::vector<std::optional<MappedFile>> mapped_files(const std::vector<const void*>& addresses);

} // namespace blobstore::internal
