#include "os/memory_usage.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include <fcntl.h>
#include <unistd.h>

#include "os/file.h"
#include "os/system_text.h"

namespace blobstore::internal {

#if BLOBSTORE_LINUX

std::optional<uint64_t> anonymous_memory() {
  constexpr char kName[] = "\nRssAnon:";
  const std::string status = system_text("/proc/self/status");
  const size_t found = status.find(kName);
  if (found == std::string::npos) {
    return std::nullopt;
  }
  return std::strtoull(status.c_str() + found + sizeof kName - 1, nullptr, 10) * 1024;
}

std::optional<MemoryUsage> memory_usage(const std::vector<MemoryRange>& ranges) {
  const int descriptor = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    return std::nullopt;
  }
  const File pagemap("/proc/self/pagemap", descriptor);
  MemoryUsage usage;
  std::vector<uint64_t> words(1 << 14);
  for (const MemoryRange& range : ranges) {
    uint64_t page = reinterpret_cast<uintptr_t>(range.pages) / page_size();
    uint64_t left = range.length / page_size();
    while (left > 0) {
      const size_t count = std::min<uint64_t>(left, words.size());
      const ssize_t got = pread(descriptor, words.data(), 8 * count, static_cast<off_t>(8 * page));
      if (got != static_cast<ssize_t>(8 * count)) {
        return std::nullopt;
      }
      for (size_t i = 0; i < count; ++i) {
        const bool present = (words[i] >> 63) & 1;
        const bool of_file = (words[i] >> 61) & 1;
        usage.resident += present ? page_size() : 0;
        usage.own += present && !of_file ? page_size() : 0;
      }
      page += count;
      left -= count;
    }
  }
  return usage;
}

#else

std::optional<uint64_t> anonymous_memory() {
  return std::nullopt;
}

std::optional<MemoryUsage> memory_usage(const std::vector<MemoryRange>&) {
  return std::nullopt;
}

#endif

} // namespace blobstore::internal
