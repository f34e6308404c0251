// The order of a tensor's dimensions in memory, and its layout.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include <blobstore/layout.h>

namespace blobstore::internal {

/// The dimensions of a tensor from outermost to innermost. ExecuTorch lets a tensor have none, which is row-major.
inline std::vector<uint8_t> dim_order_of(const executorch::aten::Tensor& tensor) {
  const auto known = tensor.dim_order();
  if (known.data() != nullptr) {
    return {known.begin(), known.end()};
  }
  std::vector<uint8_t> order(static_cast<size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), uint8_t{0});
  return order;
}

inline Layout layout_of(const executorch::aten::Tensor& tensor) {
  return {
      static_cast<int8_t>(tensor.scalar_type()), {tensor.sizes().begin(), tensor.sizes().end()}, dim_order_of(tensor)};
}

} // namespace blobstore::internal
