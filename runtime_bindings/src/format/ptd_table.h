// The table of contents of a .ptd, as it was read.
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

} // namespace blobstore::internal
