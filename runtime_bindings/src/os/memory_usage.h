// How much memory is really in use, as the kernel counts it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace blobstore::internal {

struct MemoryRange {
  const void* pages;
  size_t length;
};

struct MemoryUsage {
  uint64_t resident = 0; // bytes that are in memory, shared or not
  uint64_t own = 0; // of those, memory of this process alone: changed pages of a private map, or anonymous memory
};

/// Memory of this process alone that no file is behind, in bytes; empty if this system cannot say.
std::optional<uint64_t> anonymous_memory();

/// How much memory this process can have for pages of files, in bytes: what the system can give, and no more than the
/// limits of the groups (cgroup) that the process is in. The largest number if this system cannot say.
uint64_t memory_for_files();

/// Usage of these pages; empty if this system cannot say.
std::optional<MemoryUsage> memory_usage(const std::vector<MemoryRange>& ranges);

} // namespace blobstore::internal
