// The manifest of a .ptd: the digests of its segments and of what lies before them. See docs/format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "format/digest.h"
#include "format/flatbuffer.h"
#include "format/ptd_bounds.h"
#include "format/ptd_table.h"

namespace blobstore::internal {

/// Why the digests of a file cannot be trusted.
class ManifestError : public FormatError {
 public:
  using FormatError::FormatError;
};

[[noreturn]] void throw_manifest_error(const std::string& reason);

/// The layout of a tensor of bytes, which opaque bytes have in a file: ExecuTorch's readers follow the layout of a key
/// without looking whether it has one. Empty if they are more than one size can count.
std::optional<Layout> stand_in(uint64_t size);

/// The manifest behind the last segment; empty if the file has none there. `digests` is not set yet.
/// @throws ManifestError.
std::optional<PtdManifest> find_manifest(const uint8_t* data, uint64_t size, const PtdBounds& bounds);

/// A text of the metadata, or an empty one. Only the bounds are checked, not the digest: a commit to a working
/// copy that a killed process left may have changed half of the digests, and the text decides whether it can be
/// finished.
std::string metadata_unverified(const uint8_t* data, uint64_t size, const std::string& key);

/// Check the manifest, and copy to the table what it says about segments and keys. Those that it lists as opaque lose
/// the layout that stands in for none.
///
/// @param manifest where it is; this function sets `digests`.
/// @returns the digest of everything before the segments.
/// @throws ManifestError.
Digest read_manifest(PtdTable& table, PtdManifest& manifest, const uint8_t* data);

} // namespace blobstore::internal
