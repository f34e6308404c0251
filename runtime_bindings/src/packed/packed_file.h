// The files of packed weights: ExecuTorch's format of `packed_cache_path`, with digests; docs/packed.md specifies it.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "format/digest.h"
#include "os/file.h"

namespace blobstore::internal {

/// Bytes that XNNPACK packed, and what ExecuTorch finds them by.
struct PackedEntry {
  std::string name; // of the weight, followed by that of the bias
  uint64_t offset = 0; // in the file
  uint64_t size = 0; // in bytes
  uint32_t seed = 0; // of the kernel that they are for
  Digest digest{}; // only in files that this library wrote
};

/// What a file says of itself.
struct PackedTable {
  std::vector<PackedEntry> entries;
  std::set<Digest> covers; // the delegates whose weights are all here
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
  PackedEntry entry; // without offset and digest
  const uint8_t* data = nullptr;
};

/// The size of a file with these entries, in bytes.
uint64_t packed_size(const std::vector<PackedBytes>& entries, const std::set<Digest>& covers);

/// Write a file, which appears complete, synced and read-only, or not at all.
/// @throws Error FileAccess.
void write_packed(const std::string& path, const std::vector<PackedBytes>& entries, const std::set<Digest>& covers);

} // namespace blobstore::internal
