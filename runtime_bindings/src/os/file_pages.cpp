#include "os/file_pages.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <sys/mman.h>

#include <blobstore/error.h>

#include "os/streaming.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

#if BLOBSTORE_LINUX
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 // Linux 5.14
#endif

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kWorthMoving = size_t{256} << 10;

/// Moved pages become maps of their own, and Linux allows a process 65,530 maps by default.
constexpr int kMaxReplaced = 8192;
#endif

std::atomic<int> replaced_count{0};

void* pointer(uintptr_t at) {
  return reinterpret_cast<void*>(at);
}

/// Copy now the pages that writing would copy.
void populate(
    [[maybe_unused]] uintptr_t begin,
    [[maybe_unused]] uintptr_t end,
    [[maybe_unused]] const File& file,
    [[maybe_unused]] const std::string& what) {
#if BLOBSTORE_LINUX
  if (begin < end && madvise(pointer(begin), end - begin, MADV_POPULATE_WRITE) != 0 && errno != EINVAL) {
    const int number = errno; // EINVAL comes from an older kernel, which copies pages when they are written
    throw Error(
        ErrorKind::FileAccess, file.path(), format("no memory for {}: {}", what, std::strerror(number)), number);
  }
#endif
}

} // namespace

void make_private(uint8_t* pages, size_t size, const File& file, uint64_t offset) {
  const int flags = MAP_PRIVATE | MAP_FIXED;
  if (mmap(pages, size, PROT_READ | PROT_WRITE, flags, file.descriptor(), static_cast<off_t>(offset)) == MAP_FAILED) {
    throw_errno(file.path(), errno);
  }
}

FilePages::~FilePages() {
  replaced_count.fetch_sub(replaced_ ? 1 : 0);
}

uintptr_t FilePages::inner_begin() const {
  const uintptr_t first = align_up(begin_, page_size());
  return first > align_down(end(), page_size()) ? end() : first; // the run may lie within one page
}

uintptr_t FilePages::inner_end() const {
  const uintptr_t last = align_down(end(), page_size());
  return align_up(begin_, page_size()) > last ? end() : last;
}

#if BLOBSTORE_LINUX
/// Take fresh pages for a place. They lie between huge pages as the place does, so those that it has room for stay
/// whole when they are moved there: one fault, and one entry of the processor's table, for 512 pages.
void FilePages::Prepared::take(uintptr_t place, size_t size) {
  inner_ = Mapping(size + kHugePage);
  begin_ = reinterpret_cast<uintptr_t>(inner_.pages());
  begin_ += (place - begin_) % kHugePage;
  const uintptr_t first = align_up(begin_, kHugePage);
  const uintptr_t last = align_down(begin_ + size, kHugePage);
  if (first < last) {
    madvise(pointer(first), last - first, MADV_HUGEPAGE);
  }
}
#endif

FilePages::Prepared FilePages::prepare(const void* data, const std::string& what) const {
  Prepared prepared;
  const uintptr_t first = align_down(begin_, page_size());
  const uintptr_t last = align_up(end(), page_size());
#if BLOBSTORE_LINUX
  const size_t inner = inner_end() - inner_begin();
  if (!replaced_ && inner >= kHugePage - kHugePage / 8 && replaced_count.load() < kMaxReplaced) {
    populate(first, inner_begin(), *file_, what);
    populate(inner_end(), last, *file_, what);
    prepared.take(inner_begin(), inner);
    populate(prepared.begin_, prepared.begin_ + inner, *file_, what);
    std::memcpy(pointer(prepared.begin_), static_cast<const uint8_t*>(data) + (inner_begin() - begin_), inner);
    return prepared;
  }
#endif
  if (!replaced_) {
    populate(first, last, *file_, what);
  }
  return prepared;
}

void FilePages::write(Prepared&& prepared, const void* data, bool streamed) {
  const auto* from = static_cast<const uint8_t*>(data);
  if (move(prepared, inner_begin(), inner_end() - inner_begin())) {
    std::memcpy(pointer(begin_), from, inner_begin() - begin_);
    std::memcpy(pointer(inner_end()), from + (inner_end() - begin_), end() - inner_end());
    return;
  }
  if (streamed) {
    stream_copy(static_cast<uint8_t*>(pointer(begin_)), from, size_);
  } else {
    std::memcpy(pointer(begin_), from, size_);
  }
}

FilePages::Prepared FilePages::prepare_fresh(const std::string& what) const {
  Prepared prepared;
  if (replaced_ || written_) {
    return prepared;
  }
#if BLOBSTORE_LINUX
  if (size_ >= kWorthMoving && replaced_count.load() < kMaxReplaced) {
    prepared.take(begin_, size_);
    populate(prepared.begin_, prepared.begin_ + size_, *file_, what);
    return prepared;
  }
#endif
  populate(begin_, end(), *file_, what);
  return prepared;
}

bool FilePages::write_fresh(Prepared&& prepared) {
  written_ = true;
  return move(prepared, begin_, size_);
}

/// Move fresh pages to their place. @returns whether there are any, and the system did it.
bool FilePages::move(
    [[maybe_unused]] Prepared& prepared, [[maybe_unused]] uintptr_t place, [[maybe_unused]] size_t size) {
#if BLOBSTORE_LINUX
  void* const fresh = pointer(prepared.begin_);
  if (prepared.inner_.pages() != nullptr &&
      mremap(fresh, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, pointer(place)) != MAP_FAILED) {
    prepared.inner_.moved(fresh, size);
    replaced_ = true;
    replaced_count.fetch_add(1);
    return true;
  }
#endif
  return false;
}

FilePages::Edges FilePages::read_edges() const {
  Edges edges;
  edges.head.resize(inner_begin() - begin_);
  edges.tail.resize(end() - inner_end());
  file_->read(edges.head.data(), edges.head.size(), offset_);
  file_->read(edges.tail.data(), edges.tail.size(), offset_ + size_ - edges.tail.size());
  return edges;
}

void FilePages::restore(const Edges& edges) {
  give_back(inner_begin(), inner_end());
  std::copy(edges.head.begin(), edges.head.end(), static_cast<uint8_t*>(pointer(begin_)));
  std::copy(edges.tail.begin(), edges.tail.end(), static_cast<uint8_t*>(pointer(inner_end())));
}

void FilePages::restore_whole_pages() {
  if (replaced_) {
    give_back(inner_begin(), inner_end());
  }
  give_back(align_down(begin_, page_size()), align_up(end(), page_size()));
}

void FilePages::give_back(uintptr_t begin, uintptr_t end) {
  if (begin >= end) {
    return;
  }
  written_ = false;
#if BLOBSTORE_LINUX
  if (!replaced_) {
    madvise(pointer(begin), end - begin, MADV_DONTNEED);
    return;
  }
#endif
  const auto offset = static_cast<off_t>(offset_ + begin - begin_); // of a whole page: the sum wraps for the first one
  const int flags = MAP_PRIVATE | MAP_FIXED;
  if (mmap(pointer(begin), end - begin, PROT_READ | PROT_WRITE, flags, file_->descriptor(), offset) != MAP_FAILED) {
    replaced_count.fetch_sub(replaced_ ? 1 : 0);
    replaced_ = false;
    return;
  }
  // the process has too many maps, so it keeps the pages and reads the file's bytes into them
  const uint64_t there = file_->size() - static_cast<uint64_t>(offset);
  file_->read(pointer(begin), std::min<uint64_t>(end - begin, there), static_cast<uint64_t>(offset));
}

} // namespace blobstore::internal
