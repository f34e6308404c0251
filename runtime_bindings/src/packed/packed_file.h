// The files of packed weights: ExecuTorch's format of `packed_cache_path`, with digests; docs/packed.md specifies it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "format/digest.h"
#include "format/text_hash.h"
#include "os/scratch_file.h"
#include "packed/packed_map.h"

namespace blobstore::internal {

/// Bytes that XNNPACK packed, and what ExecuTorch finds them by.
struct PackedEntry {
  std::string name; // of the weight, followed by that of the bias
  uint64_t offset = 0; // in the file
  uint64_t size = 0; // in bytes
  uint32_t seed = 0; // of the kernel that they are for
  // only in files that this library wrote
  Digest digest{};
  uint32_t map = 0; // the number of its map, counted from 1; 0 if it has none
};

/// Entries by their names; not for longer than the entries stay where they are.
class PackedIndex {
 public:
  explicit PackedIndex(const std::vector<PackedEntry>& entries);
  /// The entry of a name, or nullptr.
  const PackedEntry* find(std::string_view name) const;

 private:
  TextMap<const PackedEntry*> by_name_;
};

// The file of a working copy has two entries that no weight can have; see packed_copy.h.
inline constexpr char kPackedKeys[] = "blobstore:keys";
inline constexpr char kPackedState[] = "blobstore:state";

/// What a file says of itself.
struct PackedTable {
  std::vector<PackedEntry> entries;
  std::set<Digest> covers; // the delegates whose weights are all here
  std::vector<PackedMap> maps; // how entries follow from stored bytes; proved for each entry that has one
};

/// Read the entries of a file that ExecuTorch writes. The caller keeps the bytes.
/// @throws Error InvalidFile.
std::vector<PackedEntry> read_stock_entries(const std::string& path, const uint8_t* data, size_t size);

/// What ExecuTorch has packed to a file so far.
struct StockPacked {
  /// @throws Error InvalidFile.
  explicit StockPacked(const ScratchFile& packed);
  const uint8_t* bytes_of(const PackedEntry& entry) const { return map.data() + entry.offset; }

  uint64_t size; // of the file
  Mapping map;
  std::vector<PackedEntry> entries;
};

/// Read the table of a file that this library wrote, and compare it with its digest.
/// @throws Error InvalidFile, Integrity.
PackedTable read_packed_table(const std::string& path, const uint8_t* data, size_t size);

struct Verified {
  uint64_t bytes = 0;
  uint64_t unchecked = 0; // entries that are not up to date, or were written meanwhile
};

/// Compare all entries with their digests. Those of a working copy change, and so do their digests, which
/// `kPackedState` has.
/// @throws Error Integrity: names the entry; InvalidFile.
Verified verify_packed(const std::string& path, const uint8_t* data, const PackedTable& table);

/// An entry of a file that is being written, and its bytes, which belong to the caller.
struct PackedBytes {
  PackedEntry entry; // without offset and digest; `map` counts in `PackedContents::maps`
  const uint8_t* data = nullptr;
};

/// What a file is made of.
struct PackedContents {
  std::vector<PackedBytes> entries;
  std::set<Digest> covers;
  std::vector<std::string> maps; // encoded
};

/// The size of a file, in bytes.
uint64_t packed_size(const PackedContents& contents);

/// Write a file, which appears complete, synced and read-only, or not at all.
/// @throws Error FileAccess.
void write_packed(const std::string& path, const PackedContents& contents);

} // namespace blobstore::internal
