// Which constants of a delegate an entry of packed weights is made of.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "delegate/blob_names.h"
#include "delegate/delegate_payload.h"
#include "packed/packed_file.h"

namespace blobstore::internal {

/// An entry, and the numbers of its constants.
struct PackedUnit {
  const PackedEntry* entry = nullptr;
  /// The weight, the bias if there is one, and the scales: all that is packed together.
  std::vector<std::optional<size_t>> sources;
};

using BlobNames = std::vector<std::shared_ptr<const BlobName>>;

/// The entries of some constants, in the order of their weights.
///
/// @param weights numbers of constants.
std::vector<PackedUnit> units_of(
    const std::vector<DelegateConstant>& constants,
    const BlobNames& names,
    const std::vector<size_t>& weights,
    const PackedIndex& entries);

/// The sizes of the sources of a unit; 0 for one that is missing.
std::vector<size_t> sizes_of(const PackedUnit& unit, const std::vector<DelegateConstant>& constants);

/// The keys of the sources of a unit; empty for one that is missing.
std::vector<std::string> keys_of(const PackedUnit& unit, const std::vector<DelegateConstant>& constants);

} // namespace blobstore::internal
