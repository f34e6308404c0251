#include "adapters/product.h"

#include <algorithm>
#include <vector>

namespace blobstore::internal {
namespace {

// A tile of the result. Its sums fill the registers of x86-64, which measured best.
constexpr size_t kRows = 4;
template <typename Number>
constexpr size_t kColumns = 48 / sizeof(Number);
// All rows pass one block of `a` before the next, so that it stays in the processor's cache.
constexpr size_t kBlockBytes = 128 << 10;

/// @param a `rank` rows of kColumns numbers. @param count how many columns of the tile there are.
template <typename Number, size_t Rows>
void add_tile(
    Number* __restrict weight,
    Number factor,
    const Number* __restrict b,
    const Number* __restrict a,
    size_t rank,
    size_t columns,
    size_t count) {
  constexpr size_t kWide = kColumns<Number>;
  Number sums[Rows][kWide] = {};
  for (size_t k = 0; k < rank; ++k) {
    for (size_t i = 0; i < Rows; ++i) {
      const Number left = b[i * rank + k];
      for (size_t j = 0; j < kWide; ++j) {
        sums[i][j] += left * a[k * kWide + j];
      }
    }
  }
  if (count == kWide) { // the compiler knows this number
    count = kWide;
  }
  for (size_t i = 0; i < Rows; ++i) {
    for (size_t j = 0; j < count; ++j) {
      weight[i * columns + j] += factor * sums[i][j];
    }
  }
}

/// Columns [first, last) of `a`, as tiles of kColumns columns, the last one filled up with zeros.
template <typename Number>
std::vector<Number> tiles_of(const Number* a, size_t rank, size_t columns, size_t first, size_t last) {
  constexpr size_t kWide = kColumns<Number>;
  std::vector<Number> tiles((last - first + kWide - 1) / kWide * kWide * rank);
  Number* out = tiles.data();
  for (size_t start = first; start < last; start += kWide) {
    const size_t count = std::min(kWide, last - start);
    for (size_t k = 0; k < rank; ++k, out += kWide) {
      std::copy_n(a + k * columns + start, count, out);
    }
  }
  return tiles;
}

template <typename Number>
void add(Number* weight, Number factor, const Number* b, const Number* a, size_t rows, size_t rank, size_t columns) {
  constexpr size_t kWide = kColumns<Number>;
  const size_t row_bytes = std::max<size_t>(rank, 1) * sizeof(Number);
  const size_t block = std::max<size_t>(kBlockBytes / row_bytes / kWide, 1) * kWide;
  for (size_t first = 0; first < columns; first += std::min(block, columns - first)) {
    const size_t last = first + std::min(block, columns - first);
    const std::vector<Number> tiles = tiles_of(a, rank, columns, first, last);
    const auto add_rows = [&](size_t row, auto tile) {
      for (size_t start = first; start < last; start += kWide) {
        Number* at = weight + row * columns + start;
        const Number* right = tiles.data() + (start - first) * rank;
        tile(at, factor, b + row * rank, right, rank, columns, std::min(kWide, last - start));
      }
    };
    size_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
      add_rows(row, add_tile<Number, kRows>);
    }
    for (; row < rows; ++row) {
      add_rows(row, add_tile<Number, 1>);
    }
  }
}

} // namespace

void add_product(
    float* weight, float factor, const float* b, const float* a, size_t rows, size_t rank, size_t columns) {
  add(weight, factor, b, a, rows, rank, columns);
}

void add_product(
    double* weight, double factor, const double* b, const double* a, size_t rows, size_t rank, size_t columns) {
  add(weight, factor, b, a, rows, rank, columns);
}

} // namespace blobstore::internal
