// Tensors with their dimensions in another order in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/tensor_view.h"

namespace blobstore::internal {

/// Copy elements to memory without gaps.
///
/// @param item bytes of an element: 1, 2, 4 or 8.
/// @param sizes, strides of the result's dimensions, the outermost first: how many, and how far apart they lie in
///   `from`, in elements.
void gather(
    const uint8_t* from,
    uint8_t* to,
    size_t item,
    const std::vector<uint64_t>& sizes,
    const std::vector<uint64_t>& strides);

/// The bytes of a dense tensor in another order; a view if the order is the same.
///
/// @param tensor its sizes are those of its dimensions by number, its bytes are in the order `from`.
/// @param from, to dimensions from the outermost to the innermost.
TensorView reorder(const TensorView& tensor, const std::vector<uint8_t>& from, const std::vector<uint8_t>& to);

/// The order of a tensor's dimensions without a layout of its own.
std::vector<uint8_t> row_major(size_t rank);

} // namespace blobstore::internal
