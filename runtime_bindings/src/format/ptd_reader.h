// Reading the table of contents of a .ptd. Whether a file can be trusted is decided here and in the two files that this
// one calls, before anything is looked up: ptd_bounds.h checks where the parts lie, ptd_manifest.h checks the digests.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/layout.h>

#include "format/digest.h"

namespace blobstore::internal {

struct PtdSegment {
  uint64_t start = 0; // in the file
  uint64_t size = 0;
  Digest digest{}; // only if the file has a manifest
};

struct PtdEntry {
  std::string key;
  uint32_t segment = 0;
  std::optional<Layout> layout; // empty for opaque bytes
  uint32_t alignment = 1;
};

/// Where a file keeps its digests; positions are in the file.
struct PtdManifest {
  uint64_t start = 0; // of the flatbuffer, whose digest follows it
  uint64_t size = 0; // of the flatbuffer
  uint64_t digests = 0; // of the digests of the segments, which lie one after the other
};

/// The checked table of contents of one file.
struct PtdTable {
  uint64_t segment_base = 0; // where in the file the segments begin
  uint64_t segment_end = 0; // and where they end
  std::vector<PtdSegment> segments;
  std::vector<PtdEntry> entries; // in the order of the file
  std::optional<PtdManifest> manifest;
  std::map<std::string, std::string> metadata; // text of the application, from the manifest
};

/// Check the structure of a file and, if it has a manifest, the digest of everything before the segments. Accepts the
/// same files as blobstore/core/formats/ptd/bounds.py. See docs/format.md.
///
/// @throws Error InvalidFile, Integrity.
PtdTable read_ptd(const std::string& path, const uint8_t* data, uint64_t size);

/// Compare all segments with their digests.
///
/// @returns false if the file has no digests.
/// @throws Error Integrity: a segment or the padding is damaged; the message names the keys.
bool verify_ptd(const std::string& path, const uint8_t* data, const PtdTable& table);

} // namespace blobstore::internal
