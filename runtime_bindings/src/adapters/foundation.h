// What an adapter is made for: the fingerprint of a foundation.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/layout.h>

#include "format/digest.h"

namespace blobstore::internal {

/// Keys in the metadata of an adapter: the fingerprint of its foundation, and alpha / rank.
constexpr char kFoundationKey[] = "blobstore.adapter.foundation";
constexpr char kScaleKey[] = "blobstore.adapter.scale";

/// A blob of a foundation.
struct FoundationBlob {
  std::string_view key;
  const std::optional<Layout>* layout = nullptr; // never null; empty for opaque bytes
  uint64_t size = 0; // in bytes
  Digest digest{};
};

/// The fingerprint, 32 hexadecimal digits; docs/format.md defines it. It does not depend on the order of the blobs.
/// @param blobs without records and without tensors of adapters.
std::string fingerprint(std::vector<FoundationBlob> blobs);

} // namespace blobstore::internal
