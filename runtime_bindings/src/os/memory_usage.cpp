#include "os/memory_usage.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <unistd.h>

#include "os/file.h"
#include "os/system_text.h"
#include "os/text.h"

namespace blobstore::internal {

#if BLOBSTORE_LINUX

namespace {

/// A number of bytes in a file of lines such as "RssAnon:   1234 kB". @param name with what is before and behind it.
std::optional<uint64_t> bytes_in(const std::string& path, std::string_view name) {
  const std::string text = system_text(path);
  const size_t found = text.find(name);
  if (found == std::string::npos) {
    return std::nullopt;
  }
  return std::strtoull(text.c_str() + found + name.size(), nullptr, 10) * 1024;
}

/// The least limit of a group and of those around it. @param root where the system shows the groups.
uint64_t least_limit(const std::string& root, std::string group, const char* file) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (bool more = true; more;) {
    const std::string text = system_text(root + group + file);
    if (!text.empty() && text[0] >= '0' && text[0] <= '9') { // and not "max"
      least = std::min<uint64_t>(least, std::strtoull(text.c_str(), nullptr, 10));
    }
    more = !group.empty();
    group.resize(more ? group.rfind('/') : 0);
  }
  return least;
}

} // namespace

std::optional<uint64_t> anonymous_memory() {
  return bytes_in("/proc/self/status", "\nRssAnon:");
}

uint64_t memory_for_files() {
  uint64_t least = bytes_in("/proc/meminfo", "\nMemAvailable:").value_or(std::numeric_limits<uint64_t>::max());
  const std::string groups = system_text("/proc/self/cgroup"); // "4:memory:/a/b" or, in version 2, "0::/a/b"
  for (size_t begin = 0; begin < groups.size();) {
    const size_t end = std::min(groups.find('\n', begin), groups.size());
    const std::string line = groups.substr(begin, end - begin);
    begin = end + 1;
    const size_t path = line.find(":/");
    if (path == std::string::npos) {
      continue;
    }
    const std::string kind = line.substr(0, path);
    const std::string group = line.substr(path + 1);
    if (kind == "0:") {
      least = std::min(least, least_limit("/sys/fs/cgroup", group, "/memory.max"));
    } else if (ends_with(kind, ":memory")) {
      least = std::min(least, least_limit("/sys/fs/cgroup/memory", group, "/memory.limit_in_bytes"));
    }
  }
  return least;
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

uint64_t memory_for_files() {
  return std::numeric_limits<uint64_t>::max();
}

std::optional<MemoryUsage> memory_usage(const std::vector<MemoryRange>&) {
  return std::nullopt;
}

#endif

} // namespace blobstore::internal
