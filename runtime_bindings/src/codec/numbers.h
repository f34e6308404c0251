// Elements, their order, and the numbers without a sign that stand for differences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "os/unaligned.h"

namespace blobstore::internal {

/// Call `use` with a zero of the type of elements without a sign that are `width` bytes wide: 1, 2, 4 or 8.
template <typename Use>
void with_element(size_t width, const Use& use) {
  switch (width) {
    case 1:
      use(uint8_t{});
      break;
    case 2:
      use(uint16_t{});
      break;
    case 4:
      use(uint32_t{});
      break;
    default:
      use(uint64_t{});
  }
}

/// Where the lowest bit that is set is, in a word that has one.
inline unsigned lowest_bit(uint64_t word) {
  return static_cast<unsigned>(__builtin_ctzll(word));
}

template <typename T>
constexpr T kTopBit = static_cast<T>(T{1} << (8 * sizeof(T) - 1));

/// All bits if the highest one is set, else none.
template <typename T>
T sign_of(T value) {
  return static_cast<T>(static_cast<std::make_signed_t<T>>(value) >> (8 * sizeof(T) - 1));
}

/// A float as an integer without a sign that is ordered as the values are: a sign and a magnitude become one number.
template <typename T>
T ordered(T element) {
  return static_cast<T>((sign_of(element) | kTopBit<T>)^element);
}

/// The inverse of `ordered`.
template <typename T>
T value_of(T number) {
  return static_cast<T>((static_cast<T>(~sign_of(number)) | kTopBit<T>)^number);
}

/// A difference as a number without a sign, the small ones first.
template <bool kFloating, typename T>
T difference(T element, T base) {
  const T by = kFloating ? static_cast<T>(ordered(element) - ordered(base)) : static_cast<T>(element - base);
  return static_cast<T>(static_cast<T>(by << 1) ^ sign_of(by));
}

/// The inverse of `difference`.
template <bool kFloating, typename T>
T apply(T number, T base) {
  const T by = static_cast<T>(static_cast<T>(number >> 1) ^ static_cast<T>(-static_cast<T>(number & 1)));
  return kFloating ? value_of(static_cast<T>(by + ordered(base))) : static_cast<T>(by + base);
}

} // namespace blobstore::internal
