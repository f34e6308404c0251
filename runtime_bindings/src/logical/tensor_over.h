// Tensors of ExecuTorch over the bytes of others.
#pragma once

#include <cstdint>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

#include "format/tensor_view.h"

namespace blobstore::internal {

/// Whether ExecuTorch can count all strides of a tensor in 32 bits. @param sizes from outermost to innermost in memory.
bool has_room_for_strides(const std::vector<int64_t>& sizes);

/// A tensor over the bytes of a view, or over a copy if they are not aligned. Keeps the view's owner alive.
///
/// @param dim_order of the bytes; empty for row-major order.
/// @throws Error Layout: ExecuTorch, which would end the process, has no tensors of this shape.
executorch::extension::TensorPtr tensor_over(TensorView view, const std::vector<uint8_t>& dim_order = {});

} // namespace blobstore::internal
