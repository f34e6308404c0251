// Tensors of ExecuTorch over the bytes of others.
#pragma once

#include <executorch/extension/tensor/tensor_ptr.h>

#include "format/tensor_view.h"

namespace blobstore::internal {

/// A tensor over the bytes of a view, or over a copy if they are not aligned. Keeps the view's owner alive.
/// @throws Error Layout: ExecuTorch, which would end the process, has no tensors of this shape.
executorch::extension::TensorPtr tensor_over(TensorView view);

} // namespace blobstore::internal
