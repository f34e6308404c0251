#include "logical/tensor_over.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include <executorch/runtime/core/exec_aten/util/tensor_dimension_limit.h>

#include <blobstore/error.h>
#include <blobstore/layout.h>

#include "logical/numbers.h"
#include "os/text.h"
#include "program/values.h"

namespace blobstore::internal {
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

/// Whether ExecuTorch can count the dimensions, and all sizes and strides in 32 bits.
bool fits(const std::vector<int64_t>& sizes, const std::vector<uint8_t>& dim_order) {
  const auto is_size = [](int64_t size) { return size >= 0 && size <= kMax; };
  if (sizes.size() > executorch::runtime::kTensorDimensionLimit || !std::all_of(sizes.begin(), sizes.end(), is_size)) {
    return false;
  }
  std::vector<int64_t> in_memory(sizes);
  for (size_t i = 0; i < dim_order.size(); ++i) {
    in_memory[i] = sizes[dim_order[i]];
  }
  return has_room_for_strides(in_memory);
}

} // namespace

bool has_room_for_strides(const std::vector<int64_t>& sizes) {
  int64_t stride = 1;
  for (auto size = sizes.rbegin(); size != sizes.rend(); ++size) {
    if (stride > kMax) {
      return false;
    }
    stride *= std::max<int64_t>(*size, 1);
  }
  return true;
}

executorch::extension::TensorPtr tensor_over(TensorView view, const std::vector<uint8_t>& dim_order) {
  if (!fits(view.sizes, dim_order)) {
    throw_error(ErrorKind::Layout, "ExecuTorch has no tensors of the shape {}", to_string(view.sizes));
  }
  if (reinterpret_cast<uintptr_t>(view.data) % item_size(view.scalar_type) != 0) {
    const TensorView copy = make_tensor(view.scalar_type, view.sizes);
    std::memcpy(filling(copy), view.data, view.nbytes);
    view = copy;
  }
  return fixed_tensor(
      {view.sizes.begin(), view.sizes.end()},
      const_cast<uint8_t*>(view.data),
      {dim_order.begin(), dim_order.end()},
      {},
      static_cast<executorch::aten::ScalarType>(view.scalar_type),
      [owner = std::move(view.owner)](void*) {});
}

} // namespace blobstore::internal
