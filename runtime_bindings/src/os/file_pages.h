// The pages under one blob in a private map of its file: how they become writable, are replaced, and are given back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "os/file.h"

namespace blobstore::internal {

/// Replace a part of a map of a file by a private, writable map of the same part, in one step.
/// @throws Error FileAccess: the process has too many maps.
void make_private(uint8_t* pages, size_t size, const File& file, uint64_t offset);

/// A run of bytes in a private, writable map of a file. Its first and last page may hold bytes of neighbours; the pages
/// between are its own. The kernel treats pages differently:
///
/// - A page that was never written is the file's, shared with every process that maps it.
/// - A page that was written is a copy of this process. Giving the copy back makes the file's page appear again.
/// - The own pages of a large run need not be copied before they are overwritten: fresh pages are filled elsewhere and
///   moved to the address in one step, which takes a fifth of the time.
class FilePages {
 public:
  /// @param data where the run is mapped; @param offset where it lies in the file.
  FilePages(uint8_t* data, size_t size, const File& file, uint64_t offset)
      : begin_(reinterpret_cast<uintptr_t>(data)), size_(size), file_(&file), offset_(offset) {}
  ~FilePages();
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  /// New contents, in memory that is already allocated, so that putting them in place cannot fail.
  class Prepared {
   public:
    Prepared() = default;

   private:
    friend class FilePages;
    void take(uintptr_t place, size_t size);

    Mapping inner_; // has fresh pages for the new bytes; if empty, the bytes are written in place
    [[maybe_unused]] uintptr_t begin_ = 0; // of these pages
  };

  /// Allocate all memory that writing these bytes takes. The contents of the run do not change.
  /// @throws Error FileAccess: there is not enough memory, or the file was truncated.
  Prepared prepare(const void* data, const std::string& what) const;
  /// @param streamed whether nobody reads the bytes soon.
  void write(Prepared&& prepared, const void* data, bool streamed);
  /// For a run of whole pages: allocate the memory for new contents that are made in place.
  /// @throws Error FileAccess: there is not enough memory.
  Prepared prepare_fresh(const std::string& what) const;
  /// Put it in place. @returns whether the run now has zeros, rather than the old contents.
  bool write_fresh(Prepared&& prepared);
  uint8_t* data() const { return reinterpret_cast<uint8_t*>(begin_); }

  /// The file's bytes around the own pages. They are read before anything changes, because reading can fail.
  struct Edges {
    std::vector<uint8_t> head, tail;
  };
  Edges read_edges() const;
  /// Restore the file's bytes without touching neighbours.
  void restore(const Edges& edges);
  /// Restore the file's pages, including the parts of neighbours on the first and last page.
  void restore_whole_pages();

 private:
  uintptr_t end() const { return begin_ + size_; }
  uintptr_t inner_begin() const; // of the own pages; equal to inner_end() without own pages
  uintptr_t inner_end() const;
  bool move(Prepared& prepared, uintptr_t place, size_t size);
  void give_back(uintptr_t begin, uintptr_t end);

  uintptr_t begin_;
  size_t size_;
  const File* file_;
  uint64_t offset_;
  bool replaced_ = false; // the own pages no longer belong to the map of the file
  bool written_ = false; // all pages are copies of this process, if the run is one of whole pages
};

} // namespace blobstore::internal
