// Transposing items of four bytes, in the vectors that every processor has. They are moved as float32, which keeps
// their bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace blobstore::internal {

using Floats = float __attribute__((vector_size(16)));

/// The first, or second, halves of two vectors, item by item, which is one instruction.
#if defined(__clang__)
inline Floats first_half(const Floats& one, const Floats& other) {
  return __builtin_shufflevector(one, other, 0, 4, 1, 5);
}
inline Floats second_half(const Floats& one, const Floats& other) {
  return __builtin_shufflevector(one, other, 2, 6, 3, 7);
}
#else // GCC has __builtin_shufflevector from version 12 on
using Order = int32_t __attribute__((vector_size(16)));
inline Floats first_half(const Floats& one, const Floats& other) {
  return __builtin_shuffle(one, other, Order{0, 4, 1, 5});
}
inline Floats second_half(const Floats& one, const Floats& other) {
  return __builtin_shuffle(one, other, Order{2, 6, 3, 7});
}
#endif

/// to[i * columns + j] = from[i + j * stride], for some columns at a time, so that what is read stays in the
/// processor's cache until all of it was used.
///
/// @param scales whether the items are float32, to be multiplied with `factor`.
template <bool scales>
void transpose(
    const uint8_t* __restrict from,
    uint8_t* __restrict to,
    uint64_t rows,
    uint64_t columns,
    uint64_t stride,
    float factor = 1) {
  constexpr uint64_t kTile = 4;
  const auto put = [=](uint64_t row, uint64_t column, auto numbers) {
    if constexpr (scales) {
      numbers *= factor;
    }
    std::memcpy(to + 4 * (row * columns + column), &numbers, sizeof numbers);
  };
  uint64_t left = 0;
  for (; left + kTile <= columns; left += kTile) {
    const uint8_t* start = from + 4 * left * stride;
    uint64_t i = 0;
    for (; i + kTile <= rows; i += kTile) {
      Floats in[kTile];
      for (uint64_t j = 0; j < kTile; ++j) {
        std::memcpy(&in[j], start + 4 * (i + j * stride), sizeof in[j]);
      }
      const Floats even_low = first_half(in[0], in[2]);
      const Floats even_high = second_half(in[0], in[2]);
      const Floats odd_low = first_half(in[1], in[3]);
      const Floats odd_high = second_half(in[1], in[3]);
      put(i, left, first_half(even_low, odd_low));
      put(i + 1, left, second_half(even_low, odd_low));
      put(i + 2, left, first_half(even_high, odd_high));
      put(i + 3, left, second_half(even_high, odd_high));
    }
    for (; i < rows; ++i) {
      Floats numbers;
      for (uint64_t j = 0; j < kTile; ++j) {
        float number;
        std::memcpy(&number, start + 4 * (i + j * stride), sizeof number);
        numbers[j] = number;
      }
      put(i, left, numbers);
    }
  }
  for (; left < columns; ++left) {
    for (uint64_t i = 0; i < rows; ++i) {
      float number;
      std::memcpy(&number, from + 4 * (i + left * stride), sizeof number);
      put(i, left, number);
    }
  }
}

} // namespace blobstore::internal
