// Where the parts of a .ptd lie in the file. Here they are bounded: nothing that is returned reaches outside the file,
// and no two segments overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "format/flatbuffer.h"
#include "format/ptd_table.h"

namespace blobstore::internal {

constexpr size_t kPtdFieldsStart = 8; // of the header: behind the root offset and the file identifier
constexpr size_t kPtdFieldsSize = 40;

/// Positions in the file, in bytes: flatbuffer_end <= segment_base <= segment_end() <= size of the file.
struct PtdBounds {
  uint64_t flatbuffer_end;
  uint64_t segment_base;
  uint64_t segment_data_size;

  uint64_t segment_end() const { return segment_base + segment_data_size; }
};

/// @throws FormatError: this is not a .ptd, or a part of it does not lie within its `size` bytes.
PtdBounds read_bounds(const uint8_t* data, uint64_t size);

/// The segments of a file, without digests. @throws FormatError: one leaves the bounds, or two overlap.
std::vector<PtdSegment> read_segments(const FlatBuffer& buffer, uint64_t root, const PtdBounds& bounds);

/// The positions of segments in the list, in the order in which they lie in the file.
std::vector<uint32_t> order_in_file(const std::vector<PtdSegment>& segments);

/// A little-endian number in a file.
uint64_t load_u64(const uint8_t* at);

} // namespace blobstore::internal
