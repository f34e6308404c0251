#include "os/read_ahead.h"

#include <algorithm>

#include <sys/mman.h>

#include "os/memory_usage.h"

namespace blobstore::internal {
namespace {

/// Linux reads no more for one request than the larger one of the device's readahead, 128 KiB by default, and its
/// largest transfer.
constexpr uint64_t kRequest = uint64_t{128} << 10;
/// A part of this size is taken to be in memory if its first page is: to look at each page of a large file that is in
/// memory takes longer than to load it.
constexpr uint64_t kPart = uint64_t{4} << 20;

bool is_in_memory(uint8_t* page) {
#if defined(__APPLE__)
  char found = 0;
#else
  unsigned char found = 0;
#endif
  return mincore(page, 1, &found) == 0 && (found & 1) != 0;
}

} // namespace

void read_ahead(const File& file, const std::vector<FileRange>& ranges, uint64_t most) {
  if (most == 0 || ranges.empty()) {
    return;
  }
  uint64_t end = 0;
  for (const FileRange& range : ranges) {
    end = std::max(end, range.offset + range.size);
  }
  const Mapping map(file, 0, end, Mapping::Kind::ReadOnly);
  bool bounded = false;
  for (const FileRange& range : ranges) {
    const uint64_t last = range.offset + range.size;
    for (uint64_t part = align_down(range.offset, page_size()); part < last; part += kPart) {
      uint8_t* const pages = map.data() + part;
      uint64_t size = std::min({kPart, last - part, most});
      if (!is_in_memory(pages)) {
        if (!bounded) { // only now, because this reads files of the system
          most = std::min(most, memory_for_files() / 2);
          bounded = true;
        }
        size = std::min(size, most);
        for (uint64_t at = 0; at < size; at += kRequest) {
          madvise(pages + at, std::min(kRequest, size - at), MADV_WILLNEED);
        }
      }
      most -= size;
      if (most == 0) {
        return;
      }
    }
  }
}

} // namespace blobstore::internal
