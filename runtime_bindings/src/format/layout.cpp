#include <blobstore/layout.h>

#include <limits>

#include "os/text.h"

namespace blobstore BLOBSTORE_API {
namespace {

using internal::format;

struct Type {
  int8_t number;
  uint8_t size;
  const char* name;
};

// The types that pack several numbers take one byte per element, as in ExecuTorch.
constexpr Type kTypes[] = {
    {0, 1, "byte"},
    {1, 1, "char"},
    {2, 2, "short"},
    {3, 4, "int"},
    {4, 8, "long"},
    {5, 2, "half"},
    {6, 4, "float"},
    {7, 8, "double"},
    {8, 4, "complex32"},
    {9, 8, "complex64"},
    {10, 16, "complex128"},
    {11, 1, "bool"},
    {12, 1, "qint8"},
    {13, 1, "quint8"},
    {14, 4, "qint32"},
    {15, 2, "bfloat16"},
    {16, 1, "quint4x2"},
    {17, 1, "quint2x4"},
    {18, 1, "bits1x8"},
    {19, 1, "bits2x4"},
    {20, 1, "bits4x2"},
    {21, 1, "bits8"},
    {22, 2, "bits16"},
    {23, 1, "float8e5m2"},
    {24, 1, "float8e4m3fn"},
    {25, 1, "float8e5m2fnuz"},
    {26, 1, "float8e4m3fnuz"},
    {27, 2, "uint16"},
    {28, 4, "uint32"},
    {29, 8, "uint64"},
};

const Type* find(int8_t number) {
  for (const Type& type : kTypes) {
    if (type.number == number) {
      return &type;
    }
  }
  return nullptr;
}

template <typename Numbers>
std::string join(const Numbers& numbers) {
  std::string text = "[";
  for (const auto number : numbers) {
    text += format("{}{}", text.size() > 1 ? ", " : "", number);
  }
  return text + "]";
}

} // namespace

size_t item_size(int8_t scalar_type) {
  const Type* type = find(scalar_type);
  return type == nullptr ? 0 : type->size;
}

std::optional<uint64_t> layout_nbytes(const Layout& layout) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  uint64_t nbytes = item_size(layout.scalar_type);
  for (const int32_t size : layout.sizes) {
    if (size == 0) {
      return 0;
    }
  }
  for (const int32_t size : layout.sizes) {
    if (size < 0 || nbytes > kMax / static_cast<uint64_t>(size)) {
      return std::nullopt;
    }
    nbytes *= static_cast<uint64_t>(size);
  }
  return nbytes;
}

std::string layout_problem(const Layout& layout) {
  const size_t rank = layout.sizes.size();
  if (find(layout.scalar_type) == nullptr) {
    return format("unknown scalar type {}", layout.scalar_type);
  }
  if (rank > kMaxRank) {
    return format("{} dimensions, at most 64 are possible", rank);
  }
  for (const int32_t size : layout.sizes) {
    if (size < 0) {
      return format("size {} is outside 0..2147483647", size);
    }
  }
  if (layout.dim_order.size() != rank) {
    return format("dim_order has {} entries for {} sizes", layout.dim_order.size(), rank);
  }
  std::vector<bool> seen(rank, false);
  for (const uint8_t dim : layout.dim_order) {
    if (dim >= rank || seen[dim]) {
      return format("dim_order {} is not a permutation of 0..{}", join(layout.dim_order), rank - 1);
    }
    seen[dim] = true;
  }
  if (!layout_nbytes(layout)) {
    return "its size in bytes overflows";
  }
  return "";
}

std::string to_string(const Layout& layout) {
  const Type* type = find(layout.scalar_type);
  std::string text = type ? type->name : std::to_string(layout.scalar_type);
  text += join(layout.sizes);
  for (size_t i = 0; i < layout.dim_order.size(); ++i) {
    if (layout.dim_order[i] != i) {
      return format("{} dim_order={}", text, join(layout.dim_order));
    }
  }
  return text;
}

std::string to_string(const std::optional<Layout>& layout) {
  return layout ? to_string(*layout) : "opaque";
}

} // namespace blobstore
