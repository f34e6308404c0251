// Reading the table of contents of a .ptd: all trust in a file is decided here, before anything is looked up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/layout.h>

#include "digest.h"

namespace blobstore {

/// Keys with this prefix are records about blobs, not blobs.
constexpr char kRecordPrefix[] = "metadata.blobstore.";

struct PtdSegment {
  uint64_t start = 0; // in the file
  uint64_t size = 0;
  Digest digest{}; // only if the file has a manifest
};

struct PtdEntry {
  std::string key;
  uint32_t segment = 0;
  std::optional<Layout> layout; // nothing: opaque bytes
  uint32_t alignment = 1;
};

/// Where a file keeps its digests.
struct PtdManifest {
  uint64_t start = 0; // of its flatbuffer in the file; the digest of that follows
  uint64_t size = 0; // of the flatbuffer
  uint64_t digests = 0; // where in the file the digests of the segments are, one after the other
};

/// The checked table of contents of one file.
struct PtdTable {
  uint64_t segment_base = 0; // where in the file the segments begin
  uint64_t segment_end = 0; // and where they end
  std::vector<PtdSegment> segments;
  std::vector<PtdEntry> entries; // in the order of the file
  std::optional<PtdManifest> manifest;
};

/// Check a file's structure and, with a manifest, the digest of all that lies in front of the blobs. The same files
/// are accepted as by blobstore/formats/ptd/reader.py. See docs/format.md.
///
/// @throws Error InvalidFile, Integrity.
PtdTable read_ptd(const std::string& path, const uint8_t* data, uint64_t size);

/// Compare all blobs with their digests.
///
/// @returns whether there were digests to compare with.
/// @throws Error Integrity: what is damaged.
bool verify_ptd(const std::string& path, const uint8_t* data, const PtdTable& table);

} // namespace blobstore
