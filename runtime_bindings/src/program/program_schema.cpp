#include "program/program_schema.h"

#include <cstring>
#include <string>

namespace blobstore::internal {

std::optional<Layout> tensor_layout(const FlatBuffer& buffer, uint64_t tensor) {
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(buffer.u8_field(tensor, kScalarType));
  const FlatVector sizes = buffer.vector(tensor, kSizes, 4);
  const FlatVector order = buffer.vector(tensor, kDimOrder, 1);
  if (sizes.count > kMaxRank || sizes.count != order.count) {
    throw_format_error("a tensor has {} sizes and a dim_order of {}", sizes.count, order.count);
  }
  for (uint32_t i = 0; i < sizes.count; ++i) {
    layout.sizes.push_back(static_cast<int32_t>(buffer.u32(sizes.start + 4ull * i)));
    layout.dim_order.push_back(buffer.u8(order.start + i));
  }
  if (item_size(layout.scalar_type) == 0) {
    return std::nullopt;
  }
  if (const std::string problem = layout_problem(layout); !problem.empty()) {
    throw_format_error("impossible tensor {}: {}", to_string(layout), problem);
  }
  return layout;
}

bool has_layout(const FlatBuffer& buffer, uint64_t tensor, const std::optional<Layout>& layout) {
  const FlatVector sizes = buffer.vector(tensor, kSizes, 4);
  const FlatVector order = buffer.vector(tensor, kDimOrder, 1);
  return layout && static_cast<int8_t>(buffer.u8_field(tensor, kScalarType)) == layout->scalar_type &&
      sizes.count == layout->sizes.size() && order.count == layout->dim_order.size() &&
      (sizes.count == 0 ||
       (std::memcmp(buffer.data() + sizes.start, layout->sizes.data(), 4ull * sizes.count) == 0 &&
        std::memcmp(buffer.data() + order.start, layout->dim_order.data(), order.count) == 0));
}

} // namespace blobstore::internal
