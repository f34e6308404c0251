// The numbers in tensors: which types updates take, and conversion between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "format/tensor_view.h"

namespace blobstore::internal {

// Scalar types, as ExecuTorch numbers them.
enum : int8_t {
  kByte = 0,
  kChar = 1,
  kShort = 2,
  kInt = 3,
  kLong = 4,
  kHalf = 5,
  kFloat = 6,
  kDouble = 7,
  kBool = 11,
  kBFloat16 = 15,
};

/// Whether updates take tensors of this type.
bool is_number(int8_t scalar_type);
/// Whether it is one of the floating-point types of weights.
bool is_floating(int8_t scalar_type);
/// For messages: "float".
std::string type_name(int8_t scalar_type);
/// For messages: "[2, 3]".
std::string to_string(const std::vector<int64_t>& sizes);

/// The number of elements. @throws Error Layout: it overflows, or a size is negative.
uint64_t count(const std::vector<int64_t>& sizes);

/// A new tensor, whose bytes are not initialized. @throws Error Layout, as `count`.
TensorView make_tensor(int8_t scalar_type, std::vector<int64_t> sizes);
/// The memory of a tensor that `make_tensor` made, to fill it.
inline uint8_t* filling(const TensorView& made) {
  return const_cast<uint8_t*>(made.data);
}

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

/// A tensor in another dtype, rounded as torch does; a view of the tensor itself if it has the dtype. Both types must
/// be numbers.
TensorView cast(const TensorView& tensor, int8_t target);
/// Convert numbers to float32.
void to_floats(int8_t scalar_type, const uint8_t* from, size_t count, float* to);

/// Whether a tensor has neither infinities nor NaN.
bool is_finite(const TensorView& tensor);
/// Whether two tensors have the same type, the same shape and, to the bit, the same numbers.
bool same_tensors(const TensorView& one, const TensorView& other);

} // namespace blobstore::internal
