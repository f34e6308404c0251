// Transposing items of four bytes, in the vectors that every processor has or in those of AVX2. They are moved as
// float32, which keeps their bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "os/processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace blobstore::internal {

inline float float_at(const uint8_t* numbers, uint64_t index) {
  float number;
  std::memcpy(&number, numbers + sizeof number * index, sizeof number);
  return number;
}

#if defined(__x86_64__)
template <bool scales>
BLOBSTORE_AVX2 inline void put_avx2(uint8_t* to, __m256 numbers, __m256 factors) {
  if constexpr (scales) {
    numbers = _mm256_mul_ps(numbers, factors);
  }
  std::memcpy(to, &numbers, sizeof numbers);
}

/// As `transpose`, for eight columns at a time: each half of a vector has four of them.
/// @returns how many columns were done; 0 if there are less than four rows.
template <bool scales>
BLOBSTORE_AVX2 uint64_t transpose_avx2(
    const uint8_t* __restrict from,
    uint8_t* __restrict to,
    uint64_t rows,
    uint64_t columns,
    uint64_t stride,
    float factor) {
  constexpr uint64_t kRows = 4;
  constexpr uint64_t kColumns = 8;
  const __m256 factors = _mm256_set1_ps(factor);
  const bool one_is_left = rows % kRows == 1; // as for all kernels of odd width and height
  uint64_t left = 0;
  for (; rows >= kRows && left + kColumns <= columns; left += kColumns) {
    for (uint64_t i = 0; i < rows - one_is_left; i += kRows) {
      const uint64_t row = std::min(i, rows - kRows); // the last four rows may include some that were done
      const uint8_t* start = from + 4 * (left * stride + row);
      uint8_t* out = to + 4 * (row * columns + left);
      __m256 in[4];
      for (uint64_t j = 0; j < 4; ++j) {
        const auto* low = reinterpret_cast<const float*>(start + 4 * j * stride);
        in[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(low + 4 * stride), 1);
      }
      const __m256 even_low = _mm256_unpacklo_ps(in[0], in[2]);
      const __m256 even_high = _mm256_unpackhi_ps(in[0], in[2]);
      const __m256 odd_low = _mm256_unpacklo_ps(in[1], in[3]);
      const __m256 odd_high = _mm256_unpackhi_ps(in[1], in[3]);
      put_avx2<scales>(out, _mm256_unpacklo_ps(even_low, odd_low), factors);
      put_avx2<scales>(out + 4 * columns, _mm256_unpackhi_ps(even_low, odd_low), factors);
      put_avx2<scales>(out + 8 * columns, _mm256_unpacklo_ps(even_high, odd_high), factors);
      put_avx2<scales>(out + 12 * columns, _mm256_unpackhi_ps(even_high, odd_high), factors);
    }
    if (one_is_left) {
      const uint8_t* last = from + 4 * (left * stride + rows - 1);
      const __m256 in = _mm256_setr_ps(
          float_at(last, 0),
          float_at(last, stride),
          float_at(last, 2 * stride),
          float_at(last, 3 * stride),
          float_at(last, 4 * stride),
          float_at(last, 5 * stride),
          float_at(last, 6 * stride),
          float_at(last, 7 * stride));
      put_avx2<scales>(to + 4 * ((rows - 1) * columns + left), in, factors);
    }
  }
  return left;
}
#endif

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
#if defined(__x86_64__)
  if (has_avx2()) {
    left = transpose_avx2<scales>(from, to, rows, columns, stride, factor);
  }
#endif
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
        numbers[j] = float_at(start, i + j * stride);
      }
      put(i, left, numbers);
    }
  }
  for (; left < columns; ++left) {
    for (uint64_t i = 0; i < rows; ++i) {
      put(i, left, float_at(from, i + left * stride));
    }
  }
}

} // namespace blobstore::internal
