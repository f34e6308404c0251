// A file of packed weights that is in use.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "format/digest.h"
#include "os/file.h"
#include "packed/packed_file.h"

namespace blobstore::internal {

/// A file that is in use: as long as this lives, no process removes it, and ExecuTorch cannot lock it for itself.
class PackedLease {
 public:
  PackedLease(File file, uint64_t size, PackedTable table)
      : file_(std::move(file)), size_(size), table_(std::move(table)), index_(table_.entries) {}

  const std::string& path() const { return file_.path(); }
  const File& file() const { return file_; }
  uint64_t size() const { return size_; }
  const PackedIndex& index() const { return index_; }
  size_t entries() const { return table_.entries.size(); }
  /// The map of an entry that has one.
  const PackedMap& map_of(const PackedEntry& entry) const { return table_.maps[entry.map - 1]; }
  /// Whether all weights of a delegate are in the file.
  bool covers(const Digest& delegate) const { return table_.covers.count(delegate) != 0; }

 private:
  File file_; // locked
  uint64_t size_;
  PackedTable table_;
  PackedIndex index_;
};

} // namespace blobstore::internal
