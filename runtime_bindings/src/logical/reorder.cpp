#include "logical/reorder.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>

#include <blobstore/layout.h>

#include "logical/numbers.h"
#include "logical/transpose.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

struct Dim {
  uint64_t size;
  uint64_t stride;
};

/// Dimensions of one element left out, neighbours joined where they are one run.
std::vector<Dim> joined(const std::vector<uint64_t>& sizes, const std::vector<uint64_t>& strides) {
  std::vector<Dim> dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) {
      continue;
    }
    if (!dims.empty() && dims.back().stride == sizes[i] * strides[i]) {
      dims.back() = {dims.back().size * sizes[i], strides[i]};
    } else {
      dims.push_back({sizes[i], strides[i]});
    }
  }
  return dims;
}

/// to[i * columns + j] = from[i + j * stride], for some columns at a time, so that what is read stays in the
/// processor's cache until all of it was used.
template <typename Item>
void transpose_items(
    const uint8_t* __restrict from, uint8_t* __restrict to, uint64_t rows, uint64_t columns, uint64_t stride) {
  constexpr uint64_t kSome = 8;
  uint64_t left = 0;
  for (; left + kSome <= columns; left += kSome) {
    const uint8_t* start = from + left * stride * sizeof(Item);
    for (uint64_t i = 0; i < rows; ++i) {
      Item some[kSome];
      for (uint64_t j = 0; j < kSome; ++j) {
        some[j] = load<Item>(start + (i + j * stride) * sizeof(Item));
      }
      std::memcpy(to + (i * columns + left) * sizeof(Item), some, sizeof some);
    }
  }
  for (; left < columns; ++left) {
    for (uint64_t i = 0; i < rows; ++i) {
      store(to + (i * columns + left) * sizeof(Item), load<Item>(from + (i + left * stride) * sizeof(Item)));
    }
  }
}

template <typename Item>
void gather_items(const uint8_t* from, uint8_t* to, const std::vector<Dim>& dims) {
  const size_t rank = dims.size();
  const Dim inner = dims[rank - 1];
  const bool runs = inner.stride == 1;
  // a dimension before the innermost whose elements lie side by side can be copied together with it
  const bool tiles = !runs && rank >= 2 && dims[rank - 2].stride == 1;
  const size_t outer = rank - (tiles ? 2 : 1);
  const uint64_t block = inner.size * (tiles ? dims[rank - 2].size : 1);
  std::vector<uint64_t> at(outer, 0);
  uint64_t blocks = 1;
  for (size_t i = 0; i < outer; ++i) {
    blocks *= dims[i].size;
  }
  uint64_t offset = 0;
  for (uint64_t done = 0; done < blocks; ++done, to += block * sizeof(Item)) {
    const uint8_t* start = from + offset * sizeof(Item);
    if (runs) {
      std::memcpy(to, start, block * sizeof(Item));
    } else if (tiles && sizeof(Item) == 4) {
      transpose<false>(start, to, dims[rank - 2].size, inner.size, inner.stride);
    } else if (tiles) {
      transpose_items<Item>(start, to, dims[rank - 2].size, inner.size, inner.stride);
    } else {
      for (uint64_t i = 0; i < block; ++i) {
        store(to + i * sizeof(Item), load<Item>(start + i * inner.stride * sizeof(Item)));
      }
    }
    for (size_t i = outer; i-- > 0;) {
      offset += dims[i].stride;
      if (++at[i] < dims[i].size) {
        break;
      }
      offset -= dims[i].stride * dims[i].size;
      at[i] = 0;
    }
  }
}

} // namespace

void gather(
    const uint8_t* from,
    uint8_t* to,
    size_t item,
    const std::vector<uint64_t>& sizes,
    const std::vector<uint64_t>& strides) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return;
  }
  std::vector<Dim> dims = joined(sizes, strides);
  if (dims.empty()) {
    dims.push_back({1, 1});
  }
  switch (item) {
    case 1:
      return gather_items<uint8_t>(from, to, dims);
    case 2:
      return gather_items<uint16_t>(from, to, dims);
    case 4:
      return gather_items<uint32_t>(from, to, dims);
    case 16:
      return gather_items<std::array<uint64_t, 2>>(from, to, dims);
    default:
      return gather_items<uint64_t>(from, to, dims);
  }
}

TensorView reorder(const TensorView& tensor, const std::vector<uint8_t>& from, const std::vector<uint8_t>& to) {
  if (from == to || tensor.nbytes == 0) {
    return tensor;
  }
  std::vector<uint64_t> strides(tensor.sizes.size());
  uint64_t step = 1;
  for (size_t i = from.size(); i-- > 0;) {
    strides[from[i]] = step;
    step *= static_cast<uint64_t>(tensor.sizes[from[i]]);
  }
  std::vector<uint64_t> sizes;
  std::vector<uint64_t> moved;
  for (const uint8_t dim : to) {
    sizes.push_back(static_cast<uint64_t>(tensor.sizes[dim]));
    moved.push_back(strides[dim]);
  }
  TensorView out = make_tensor(tensor.scalar_type, tensor.sizes);
  gather(tensor.data, filling(out), item_size(tensor.scalar_type), sizes, moved);
  return out;
}

std::vector<uint8_t> row_major(size_t rank) {
  std::vector<uint8_t> order(rank);
  std::iota(order.begin(), order.end(), uint8_t{0});
  return order;
}

} // namespace blobstore::internal
