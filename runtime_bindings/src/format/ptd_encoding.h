// The flatbuffers of a .ptd as bytes: the table of contents and the manifest. They are byte for byte those of
// blobstore/core/formats/ptd, so equal contents in equal order give equal files, whichever of the two wrote them.
// Metadata may lie elsewhere in the manifest.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/layout.h>

#include "format/digest.h"

namespace blobstore::internal {

/// One key of a table of contents. The caller owns key and layout.
struct TableKey {
  std::string_view key;
  uint32_t segment = 0;
  const std::optional<Layout>* layout = nullptr; // never null; empty for a key that gets none
};

struct TableSegment {
  uint64_t offset = 0; // from the segment base
  uint64_t size = 0;
};

/// The table of contents, with zeros where `encode_header` goes.
/// @throws Error Unsupported: it would be longer than flatbuffers can be.
std::vector<uint8_t> encode_table(const std::vector<TableKey>& keys, const std::vector<TableSegment>& segments);

/// Write the header into an encoded table.
void encode_header(std::vector<uint8_t>& table, uint64_t segment_base, uint64_t segment_data_size);

/// The bytes behind the last segment: the manifest, its digest, its length, and the magic that ends the file.
///
/// @param head the digest of everything before the segments.
/// @param digests of the segments.
/// @param alignments of the keys.
/// @param metadata text of the application.
/// @param opaque the indices of the keys whose layout stands in for none, ascending.
std::vector<uint8_t> encode_manifest(
    const Digest& head,
    const std::vector<Digest>& digests,
    const std::vector<uint32_t>& alignments,
    const std::map<std::string, std::string>& metadata,
    const std::vector<uint32_t>& opaque);

} // namespace blobstore::internal
