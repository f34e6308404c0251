// Where the blobs of opened files lie in memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/cache.h>

#include "format/ptd_reader.h"
#include "format/text_hash.h"
#include "os/file.h"
#include "os/file_pages.h"
#include "os/memory_usage.h"

namespace blobstore::internal {

class WorkingCopy;

/// A file and the memory that holds it.
struct Source {
  std::string path;
  File file; // in mode Private: where the clean bytes are
  uint64_t size = 0; // of the file, when it was opened
  Mapping map;
  PtdTable table;
};

/// A blob and what a commit needs to know about it.
struct Slot : Blob {
  uint8_t* memory = nullptr; // what `data` is, for those who change it
  size_t source = 0;
  uint32_t segment = 0;
  uint64_t entry = 0; // its number in the file
  bool first_of_segment = true; // other keys that share its bytes in the file come later
  std::optional<FilePages> pages; // if it lies in a private map of the file
  bool dirty = false;
  std::vector<uint8_t> original; // of a dirty blob that is not in a map of its file
  std::atomic<uint64_t> version{0};
};

/// Opens files and gives every key an address of its own. Addresses never change; only a commit changes the bytes, and
/// `dirty`, `original` and `version` of the slots.
class PlacedBlobs {
 public:
  explicit PlacedBlobs(BlobCache::Mode mode) : mode_(mode) {}

  /// Map a file, or read it in mode Copy. @throws Error as BlobCache::open.
  void open(const std::string& path);
  /// Map a working copy, after finishing a commit that a killed process left. @throws Error as BlobCache::open.
  void open_shared(WorkingCopy& copy, const std::string& path);

  /// The slot of a key, nullptr if no file has the key.
  Slot* find(std::string_view key) const;
  const std::vector<std::unique_ptr<Slot>>& slots() const { return slots_; }
  const std::deque<Source>& sources() const { return sources_; }
  const Source& source_of(const Slot& slot) const { return sources_[slot.source]; }
  const PtdSegment& segment_of(const Slot& slot) const { return source_of(slot).table.segments[slot.segment]; }
  /// @throws Error FileAccess: the file was truncated, also if the bytes in memory are newer: the system takes those
  /// pages, too.
  void check_length(const Slot& slot) const {
    if (slot.pages) { // otherwise the bytes are in memory of their own
      source_of(slot).file.check_length(segment_of(slot).start + slot.size);
    }
  }

  /// Whether two keys have the same bytes in a file.
  bool shares_segments() const { return shares_segments_; }
  /// All pages that the blobs lie in.
  std::vector<MemoryRange> ranges() const;
  /// Whether any of these bytes lie in these pages.
  bool overlaps(const void* data, size_t size) const;

 private:
  void add_source(Source source);
  void add_keys(size_t number);
  void place(Slot& slot, const Source& source, const PtdSegment& segment, bool taken);
  void check_copies(uint64_t size, const Source& source) const;
  uint8_t* take_memory(size_t size, size_t alignment);
  void check_same(
      const Slot& known, const PtdEntry& entry, const uint8_t* data, size_t size, const std::string& path) const;

  BlobCache::Mode mode_;
  std::deque<Source> sources_; // slots refer to their files
  bool shares_segments_ = false;
  std::deque<Mapping> own_maps_; // for keys that share a segment with another key
  uint8_t* spare_ = nullptr; // for small copies, many to a page
  size_t spare_used_ = 0;
  size_t spare_size_ = 0;
  uint64_t copied_ = 0; // bytes copied there from the file that is being opened
  std::vector<std::unique_ptr<Slot>> slots_;
  TextMap<Slot*> index_;
};

} // namespace blobstore::internal
