// Asking the system to read pages of files before they are used.
#pragma once

#include <cstdint>
#include <vector>

#include "os/file.h"

namespace blobstore::internal {

/// Bytes of a file.
struct FileRange {
  uint64_t offset = 0;
  uint64_t size = 0;
};

/// Ask the system to read parts of a file where they are not in memory, in this order, without waiting for them.
///
/// @param most how many bytes of the parts to look at. Never more is asked for than half of what this process can have
///   in memory, because pages beyond that would replace those that were asked for first.
void read_ahead(const File& file, const std::vector<FileRange>& ranges, uint64_t most);

} // namespace blobstore::internal
