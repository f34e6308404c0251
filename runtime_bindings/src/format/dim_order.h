// The order of a tensor's dimensions in memory.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

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

} // namespace blobstore::internal
