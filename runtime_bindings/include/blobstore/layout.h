// How bytes form a tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

/// Scalar type, sizes and dim order of a tensor. Scalar types are numbered as in ExecuTorch.
struct Layout {
  int8_t scalar_type = 0;
  std::vector<int32_t> sizes;
  std::vector<uint8_t> dim_order; // dimensions from outermost to innermost in memory

  bool operator==(const Layout& other) const {
    return scalar_type == other.scalar_type && sizes == other.sizes && dim_order == other.dim_order;
  }
  bool operator!=(const Layout& other) const { return !(*this == other); }
};

/// The largest number of dimensions that torch and numpy support.
constexpr size_t kMaxRank = 64;

/// Bytes of one element, 0 for a number that is not a scalar type.
size_t item_size(int8_t scalar_type);

/// Bytes of the tensor, without padding; empty if the number overflows.
std::optional<uint64_t> layout_nbytes(const Layout& layout);

/// Why a layout is impossible; empty if it is possible.
std::string layout_problem(const Layout& layout);

/// For messages: "float[3, 4]"; an opaque blob is "opaque".
std::string to_string(const Layout& layout);
std::string to_string(const std::optional<Layout>& layout);

} // namespace blobstore
