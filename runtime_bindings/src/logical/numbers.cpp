#include "logical/numbers.h"

#include <algorithm>
#include <limits>

#include <blobstore/error.h>
#include <blobstore/layout.h>

#include "os/heap.h"
#include "os/text.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

uint32_t bits_of(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

/// To the nearest, ties to even.
uint16_t to_bfloat16(float number) {
  const uint32_t bits = bits_of(number);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

/// To the nearest, ties to even.
uint16_t to_half(float number) {
  constexpr uint32_t kSmallestNormal = 113u << 23; // 2^-14
  constexpr uint32_t kTooLarge = 0x477ff000; // 65520 rounds to infinity
  const uint32_t bits = bits_of(number);
  const uint32_t size = bits & 0x7fffffff;
  // the last bit of 0.5 as a float is worth as much as that of a subnormal half
  const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
  const uint32_t normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
  const uint32_t nan = 0x7e00 | ((size >> 13) & 0x3ff);
  uint32_t half = size < kSmallestNormal ? subnormal : normal;
  half = size >= kTooLarge ? 0x7c00 : half;
  half = size > 0x7f800000 ? nan : half;
  return static_cast<uint16_t>(half | (bits >> 31) << 15);
}

float from_half(uint16_t half) {
  const uint32_t size = half & 0x7fffu;
  const uint32_t normal = (size << 13) + (112u << 23);
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f);
  const uint32_t special = 0x7f800000 | (size << 13);
  uint32_t bits = size < 0x400 ? subnormal : normal;
  bits = size >= 0x7c00 ? special : bits;
  return float_of(bits | static_cast<uint32_t>(half & 0x8000) << 16);
}

/// Apply a function to all numbers.
template <typename From, typename To, typename Function>
void convert(const uint8_t* from, size_t count, uint8_t* to, Function function) {
  for (size_t i = 0; i < count; ++i) {
    store<To>(to + i * sizeof(To), function(load<From>(from + i * sizeof(From))));
  }
}

/// A number of any type, without loss.
struct Exact {
  bool integer;
  int64_t whole;
  double real;
};

Exact read(int8_t type, const uint8_t* at) {
  switch (type) {
    case kByte:
    case kBool:
      return {true, load<uint8_t>(at), 0};
    case kChar:
      return {true, load<int8_t>(at), 0};
    case kShort:
      return {true, load<int16_t>(at), 0};
    case kInt:
      return {true, load<int32_t>(at), 0};
    case kLong:
      return {true, load<int64_t>(at), 0};
    case kHalf:
      return {false, 0, from_half(load<uint16_t>(at))};
    case kBFloat16:
      return {false, 0, from_bfloat16(load<uint16_t>(at))};
    case kFloat:
      return {false, 0, load<float>(at)};
    default:
      return {false, 0, load<double>(at)};
  }
}

/// Without the fraction; numbers that are out of range, and NaN, become the smallest.
int64_t truncated(double real) {
  const bool fits = real >= -0x1p63 && real < 0x1p63;
  return fits ? static_cast<int64_t>(real) : std::numeric_limits<int64_t>::min();
}

void write(int8_t type, uint8_t* at, const Exact& number) {
  const int64_t whole = number.integer ? number.whole : truncated(number.real);
  const float single = number.integer ? static_cast<float>(number.whole) : static_cast<float>(number.real);
  switch (type) {
    case kBool:
      return store<uint8_t>(at, number.integer ? number.whole != 0 : number.real != 0);
    case kByte:
    case kChar:
      return store(at, static_cast<uint8_t>(whole));
    case kShort:
      return store(at, static_cast<uint16_t>(whole));
    case kInt:
      return store(at, static_cast<uint32_t>(whole));
    case kLong:
      return store(at, whole);
    case kHalf:
      return store(at, to_half(single));
    case kBFloat16:
      return store(at, to_bfloat16(single));
    case kFloat:
      return store(at, single);
    default:
      return store(at, number.integer ? static_cast<double>(number.whole) : number.real);
  }
}

/// Whether none of the numbers has all bits of its exponent set.
template <typename Bits>
bool all_finite(const uint8_t* data, size_t count, Bits exponent) {
  constexpr size_t kChunk = 1 << 16;
  for (size_t start = 0; start < count; start += kChunk) {
    bool found = false;
    const size_t stop = std::min(count, start + kChunk);
    for (size_t i = start; i < stop; ++i) {
      found |= (load<Bits>(data + i * sizeof(Bits)) & exponent) == exponent;
    }
    if (found) {
      return false;
    }
  }
  return true;
}

} // namespace

bool is_number(int8_t type) {
  return (type >= kByte && type <= kDouble) || type == kBool || type == kBFloat16;
}

bool is_floating(int8_t type) {
  return type == kHalf || type == kFloat || type == kDouble || type == kBFloat16;
}

std::string type_name(int8_t scalar_type) {
  const std::string layout = blobstore::to_string(Layout{scalar_type, {}, {}});
  return layout.substr(0, layout.find('['));
}

std::string to_string(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) {
    text += format("{}{}", text.size() > 1 ? ", " : "", size);
  }
  return text + "]";
}

uint64_t count(const std::vector<int64_t>& sizes) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  uint64_t product = 1;
  bool empty = false;
  for (const int64_t size : sizes) {
    empty = empty || size == 0;
    if (size < 0 || (size != 0 && product > kMax / static_cast<uint64_t>(size))) {
      throw_error(ErrorKind::Layout, "no tensor can have the shape {}", to_string(sizes));
    }
    product *= size == 0 ? 1 : static_cast<uint64_t>(size);
  }
  return empty ? 0 : product;
}

TensorView make_tensor(int8_t scalar_type, std::vector<int64_t> sizes) {
  const uint64_t elements = count(sizes);
  const size_t item = item_size(scalar_type);
  if (elements > std::numeric_limits<int64_t>::max() / item) {
    throw_error(ErrorKind::Layout, "no tensor can have the shape {}", to_string(sizes));
  }
  const std::shared_ptr<uint8_t[]> memory = make_memory(elements * item);
  return {
      scalar_type, std::move(sizes), memory.get(), elements * item, std::shared_ptr<const void>(memory, memory.get())};
}

TensorView cast(const TensorView& tensor, int8_t target) {
  const int8_t type = tensor.scalar_type;
  if (type == target) {
    return tensor;
  }
  const TensorView out = make_tensor(target, tensor.sizes);
  const size_t numbers = out.nbytes / item_size(target);
  uint8_t* to = filling(out);
  if (target == kFloat) {
    to_floats(type, tensor.data, numbers, reinterpret_cast<float*>(to));
  } else if (type == kFloat && target == kBFloat16) {
    convert<float, uint16_t>(tensor.data, numbers, to, to_bfloat16);
  } else if (type == kFloat && target == kHalf) {
    convert<float, uint16_t>(tensor.data, numbers, to, to_half);
  } else {
    for (size_t i = 0; i < numbers; ++i) {
      write(target, to + i * item_size(target), read(type, tensor.data + i * item_size(type)));
    }
  }
  return out;
}

void to_floats(int8_t type, const uint8_t* from, size_t count, float* to) {
  auto* bytes = reinterpret_cast<uint8_t*>(to);
  switch (type) {
    case kFloat:
      if (count != 0) {
        std::memcpy(to, from, count * sizeof(float));
      }
      return;
    case kDouble:
      return convert<double, float>(from, count, bytes, [](double number) { return static_cast<float>(number); });
    case kHalf:
      return convert<uint16_t, float>(from, count, bytes, from_half);
    case kBFloat16:
      return convert<uint16_t, float>(from, count, bytes, from_bfloat16);
    default:
      for (size_t i = 0; i < count; ++i) {
        write(kFloat, bytes + i * sizeof(float), read(type, from + i * item_size(type)));
      }
  }
}

bool is_finite(const TensorView& tensor) {
  switch (tensor.scalar_type) {
    case kHalf:
      return all_finite<uint16_t>(tensor.data, tensor.nbytes / 2, 0x7c00);
    case kBFloat16:
      return all_finite<uint16_t>(tensor.data, tensor.nbytes / 2, 0x7f80);
    case kFloat:
      return all_finite<uint32_t>(tensor.data, tensor.nbytes / 4, 0x7f800000);
    case kDouble:
      return all_finite<uint64_t>(tensor.data, tensor.nbytes / 8, uint64_t{0x7ff} << 52);
    default:
      return true;
  }
}

bool same_tensors(const TensorView& one, const TensorView& other) {
  return one.scalar_type == other.scalar_type && one.sizes == other.sizes && one.nbytes == other.nbytes &&
      (one.nbytes == 0 || one.data == other.data || std::memcmp(one.data, other.data, one.nbytes) == 0);
}

} // namespace blobstore::internal
