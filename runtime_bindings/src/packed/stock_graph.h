// What XNNPACK's own payloads say of how weights are packed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace blobstore::internal {

/// What operators say of the packing of an entry, by its name: the keys of the weight and of the bias.
using PackedWays = std::map<std::string, std::string>;

/// Note what a payload of XNNPACK packs, and how.
///
/// @returns whether the name of each entry stands for one way of packing, also in the payloads that were noted before.
///   If not, XNNPACK, which knows entries by their names, would use the weights of one operator for another: their
///   inputs may have other zero points, or their strides differ.
/// @throws FormatError: it is not such a payload.
bool note_packed_ways(const uint8_t* payload, size_t size, PackedWays& ways);

} // namespace blobstore::internal
