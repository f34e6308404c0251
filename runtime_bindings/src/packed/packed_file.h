// The files of packed weights: ExecuTorch's format of `packed_cache_path`, with digests; docs/packed.md specifies it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "format/digest.h"
#include "os/file.h"
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

/// What a file says of itself.
struct PackedTable {
  std::vector<PackedEntry> entries;
  std::set<Digest> covers; // the delegates whose weights are all here
  std::vector<PackedMap> maps; // how entries follow from stored bytes; proved for each entry that has one
};

/// Read the table that ExecuTorch writes. The caller keeps the bytes.
/// @throws Error InvalidFile.
PackedTable read_stock_table(const std::string& path, const uint8_t* data, size_t size);

/// Read the table of a file that this library wrote, and compare it with its digest.
/// @throws Error InvalidFile, Integrity.
PackedTable read_packed_table(const std::string& path, const uint8_t* data, size_t size);

/// Compare all entries with their digests. @throws Error Integrity: names the entry.
void verify_packed(const std::string& path, const uint8_t* data, const PackedTable& table);

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
