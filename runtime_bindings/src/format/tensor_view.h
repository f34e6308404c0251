// Tensors as bytes with a dtype and a shape.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace blobstore::internal {

/// A dense tensor in row-major order. `owner` keeps the bytes alive; it is empty if the caller does. The bytes need not
/// be aligned, and `data` may be null for an empty tensor.
struct TensorView {
  int8_t scalar_type = 0; // as ExecuTorch numbers them
  std::vector<int64_t> sizes;
  const uint8_t* data = nullptr;
  size_t nbytes = 0;
  std::shared_ptr<const void> owner;
};

} // namespace blobstore::internal
