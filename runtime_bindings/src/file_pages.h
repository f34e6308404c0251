// The pages under one blob in a private map of its file: made writable, replaced, and given back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "file.h"

namespace blobstore {

/// A run of bytes in a private, writable map of a file. Its first and last page may hold bytes of neighbours; the pages
/// between are its own. What is told apart here is what the kernel does about them:
///
/// - A page that nobody wrote is the file's, shared with whoever maps it.
/// - A page that was written is a copy of this process; giving the copy back makes the file's appear again.
/// - The own pages of a large run that is to be overwritten need not be copied first: fresh pages are filled beside and
///   moved to the address in one step, which takes a fifth of the time.
class FilePages {
 public:
  /// @param data where the run is mapped; @param offset where it lies in the file.
  FilePages(uint8_t* data, size_t size, const File& file, uint64_t offset)
      : begin_(reinterpret_cast<uintptr_t>(data)), size_(size), file_(&file), offset_(offset) {}
  ~FilePages();
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  /// New contents, in memory that is there already: putting them in place cannot fail.
  class Prepared {
   public:
    Prepared() = default;

   private:
    friend class FilePages;
    Mapping inner_; // fresh pages with the new bytes; empty: the bytes are written where they go
    size_t skip_ = 0; // to the first of them
  };

  /// Get all memory that writing these bytes takes. What the run holds does not change.
  /// @throws Error FileAccess: there is not enough memory, or the file was truncated.
  Prepared prepare(const void* data, const std::string& what) const;
  void write(Prepared&& prepared, const void* data);

  /// The file's bytes around the own pages, read before anything is changed because reading can fail.
  struct Edges {
    std::vector<uint8_t> head, tail;
  };
  Edges read_edges() const;
  /// Back to the file's bytes, without touching neighbours.
  void restore(const Edges& edges);
  /// Back to the file's pages, with whatever else lies on the first and the last.
  void restore_whole_pages();

 private:
  uintptr_t end() const { return begin_ + size_; }
  uintptr_t inner_begin() const; // own pages; none if they are equal
  uintptr_t inner_end() const;
  void give_back(uintptr_t begin, uintptr_t end);

  uintptr_t begin_;
  size_t size_;
  const File* file_;
  uint64_t offset_;
  bool replaced_ = false; // the own pages are no pages of the map any more
};

} // namespace blobstore
