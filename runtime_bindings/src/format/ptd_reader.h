// Reading the table of contents of a .ptd. Whether a file can be trusted is decided here and in the two files that this
// one calls, before anything is looked up: ptd_bounds.h checks where the parts lie, ptd_manifest.h checks the digests.
#pragma once

#include <cstdint>
#include <string>

#include "format/ptd_table.h"

namespace blobstore::internal {

/// Check the structure of a file and, if it has a manifest, the digest of everything before the segments.
/// See docs/format.md.
///
/// @throws Error InvalidFile, Integrity.
PtdTable read_ptd(const std::string& path, const uint8_t* data, uint64_t size);

/// Compare all segments with their digests.
///
/// @returns false if the file has no digests.
/// @throws Error Integrity: a segment or the padding is damaged; the message names the keys.
bool verify_ptd(const std::string& path, const uint8_t* data, const PtdTable& table);

} // namespace blobstore::internal
