#include "logical/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include <blobstore/error.h>
#include <blobstore/layout.h>

#include "logical/channels.h"
#include "logical/numbers.h"
#include "logical/transpose.h"
#include "os/processor.h"
#include "os/text.h"
#include "os/unaligned.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace blobstore::internal {
namespace {

/// How the numbers of a step are rounded to integers: to the nearest, ties to even; then the zero point is added; then
/// they are limited. NaN becomes 0.
struct Rounding {
  int8_t target;
  int64_t zero;
  int64_t low;
  int64_t high;

  /// Whether float32 has all integers in question, and the bits of a sum can be taken for the nearest one.
  bool is_small() const {
    constexpr int64_t kMost = 1 << 20;
    return item_size(target) == 1 && std::abs(zero) <= kMost && std::abs(low) <= kMost && std::abs(high) <= kMost;
  }
  bool is_int() const {
    using Limits = std::numeric_limits<int32_t>;
    return target == kInt && std::min(low, high) >= Limits::min() && std::max(low, high) <= Limits::max();
  }
};

constexpr float kNearest = 0x1.8p23f; // the sum of this and a number below 2^22 ends with the nearest integer

/// An integer of one byte; see Rounding::is_small.
struct SmallRounder {
  explicit SmallRounder(const Rounding& rounding)
      : low(static_cast<float>(rounding.low - rounding.zero)),
        high(static_cast<float>(rounding.high - rounding.zero)),
        zero(static_cast<uint8_t>(rounding.zero)) {}

  uint8_t operator()(float scaled) const {
    float limited = scaled < low ? low : scaled;
    limited = limited > high ? high : limited;
    const float sum = limited + kNearest;
    uint32_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    bits = scaled == scaled ? bits : 0u - zero;
    return static_cast<uint8_t>(static_cast<uint8_t>(bits) + zero); // the last byte of kNearest is 0
  }

  float low;
  float high;
  uint8_t zero;
};

/// To the nearest integer, ties to even; numbers of 2^23 and more have no fraction. std::nearbyint is not vectorized.
BLOBSTORE_INLINE float nearest(float number) {
  const float shift = std::copysign(0x1p23f, number);
  const float rounded = (number + shift) - shift;
  return std::abs(number) < 0x1p23f ? rounded : number;
}

/// A number of kInt that has limits within its range. float32 cannot represent 2^31 - 1, so they are compared as
/// integers.
struct IntRounder {
  explicit IntRounder(const Rounding& rounding)
      : zero(static_cast<float>(rounding.zero)),
        low(static_cast<int32_t>(rounding.low)),
        high(static_cast<int32_t>(rounding.high)) {}

  int32_t operator()(float scaled) const {
    using Limits = std::numeric_limits<int32_t>;
    const float sum = nearest(scaled) + zero;
    const auto rounded = static_cast<int32_t>(sum >= -0x1p31f && sum < 0x1p31f ? sum : -0x1p31f);
    int32_t limited = sum >= 0x1p31f ? Limits::max() : rounded;
    limited = limited < low ? low : limited;
    limited = limited > high ? high : limited;
    return sum == sum ? limited : Limits::min();
  }

  float zero;
  int32_t low;
  int32_t high;
};

/// Any integer.
struct WideRounder {
  explicit WideRounder(const Rounding& rounding) : about(rounding) {}

  int64_t operator()(float scaled) const {
    const float sum = nearest(scaled) + static_cast<float>(about.zero);
    if (sum != sum) {
      return about.target == kInt ? std::numeric_limits<int32_t>::min() : 0;
    }
    double limited = sum;
    const bool is_int = about.target == kInt;
    const double low = is_int ? static_cast<double>(about.low) : static_cast<float>(about.low);
    const double high = is_int ? static_cast<double>(about.high) : static_cast<float>(about.high);
    limited = limited < low ? low : limited;
    limited = limited > high ? high : limited;
    return limited >= -0x1p62 && limited <= 0x1p62 ? static_cast<int64_t>(limited) : 0;
  }

  Rounding about;
};

/// What numbers are multiplied with: all with one factor, or each with its own.
struct Factor {
  float factor;
  float operator()(size_t) const { return factor; }
#if defined(__x86_64__)
  BLOBSTORE_AVX2 BLOBSTORE_INLINE __m256 eight(size_t) const { return _mm256_set1_ps(factor); }
#endif
};
struct Factors {
  const float* factors;
  float operator()(size_t i) const { return factors[i]; }
#if defined(__x86_64__)
  BLOBSTORE_AVX2 BLOBSTORE_INLINE __m256 eight(size_t i) const { return _mm256_loadu_ps(factors + i); }
#endif
};

/// to[i] = made(from[i] * factor(i)), from i = begin on
template <typename To, typename By, typename Made>
BLOBSTORE_INLINE void product_loop(
    const uint8_t* __restrict from, size_t begin, size_t count, By factor, Made made, uint8_t* __restrict to) {
  for (size_t i = begin; i < count; ++i) {
    store(to + sizeof(To) * i, static_cast<To>(made(load<float>(from + sizeof(float) * i) * factor(i))));
  }
}

#if defined(__x86_64__)
/// What product_loop does for an integer of one byte, for 32 numbers at a time. The compiler does not know that they
/// fit, and narrows them in more steps. @returns how many were done; 0 if they may not fit.
template <typename By>
BLOBSTORE_AVX2 size_t
round_avx2(const uint8_t* from, size_t count, By factor, const SmallRounder& rounder, uint8_t* to) {
  if (rounder.zero != 0 || std::min(rounder.low, rounder.high) < -128 || std::max(rounder.low, rounder.high) > 127) {
    return 0;
  }
  const __m256 low = _mm256_set1_ps(rounder.low);
  const __m256 high = _mm256_set1_ps(rounder.high);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); // narrowing works on both halves of a vector alone
  const auto* numbers = reinterpret_cast<const float*>(from);
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    __m256i rounded[4];
    for (size_t j = 0; j < 4; ++j) {
      const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(numbers + i + 8 * j), factor.eight(i + 8 * j));
      const __m256 limited = _mm256_min_ps(high, _mm256_max_ps(low, scaled)); // NaN stays NaN
      rounded[j] = _mm256_cvtps_epi32(_mm256_and_ps(limited, _mm256_cmp_ps(scaled, scaled, _CMP_ORD_Q)));
    }
    const __m256i first = _mm256_packs_epi32(rounded[0], rounded[1]);
    const __m256i second = _mm256_packs_epi32(rounded[2], rounded[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
    std::memcpy(to + i, &bytes, sizeof bytes);
  }
  return i;
}
#endif

template <typename To, typename By, typename Made>
BLOBSTORE_AVX2 void product_avx2(const uint8_t* from, size_t count, By factor, Made made, uint8_t* to) {
  size_t begin = 0;
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Made, SmallRounder>) {
    begin = round_avx2(from, count, factor, made, to);
  }
#endif
  product_loop<To>(from, begin, count, factor, made, to);
}

template <typename To, typename By, typename Made>
void product(const uint8_t* from, size_t count, By factor, Made made, uint8_t* to) {
  if (has_avx2()) {
    product_avx2<To>(from, count, factor, made, to);
  } else {
    product_loop<To>(from, 0, count, factor, made, to);
  }
}

template <typename By>
void quantize(const Rounding& rounding, const uint8_t* from, size_t count, By inverse, uint8_t* to) {
  if (rounding.is_small()) {
    product<uint8_t>(from, count, inverse, SmallRounder(rounding), to);
  } else if (rounding.is_int()) {
    product<int32_t>(from, count, inverse, IntRounder(rounding), to);
  } else {
    switch (item_size(rounding.target)) {
      case 1:
        return product<uint8_t>(from, count, inverse, WideRounder(rounding), to);
      case 2:
        return product<uint16_t>(from, count, inverse, WideRounder(rounding), to);
      case 4:
        return product<uint32_t>(from, count, inverse, WideRounder(rounding), to);
      default:
        return product<uint64_t>(from, count, inverse, WideRounder(rounding), to);
    }
  }
}

template <typename By>
void multiply(const uint8_t* from, size_t count, By factor, uint8_t* to) {
  product<float>(from, count, factor, [](float made) { return made; }, to);
}

/// The numbers of a tensor as float32, part by part.
class Floats {
 public:
  explicit Floats(const TensorView& tensor) : tensor_(tensor) {}

  const uint8_t* part(uint64_t begin, uint64_t end) {
    const uint8_t* start = tensor_.data + begin * item_size(tensor_.scalar_type);
    if (tensor_.scalar_type == kFloat) {
      return start;
    }
    made_.resize(end - begin);
    to_floats(tensor_.scalar_type, start, made_.size(), made_.data());
    return reinterpret_cast<const uint8_t*>(made_.data());
  }

 private:
  TensorView tensor_;
  std::vector<float> made_;
};

[[noreturn]] void throw_misfit(const TensorView& tensor, size_t scales) {
  throw_error(ErrorKind::Layout, "a tensor of shape {} does not fit {} scales", to_string(tensor.sizes), scales);
}

/// @throws Error UnsupportedData: the step has not what it needs.
[[noreturn]] void throw_lacking(const Step& step, const char* lacking) {
  throw_error(ErrorKind::UnsupportedData, "{} {}", to_string(step.operation), lacking);
}

Rounding rounding_of(const Step& step, int64_t zero) {
  const size_t count = step.ints.size();
  const Rounding rounding{target_of(step), zero, int_of(step, count - 3), int_of(step, count - 2)};
  if (!is_number(rounding.target) || is_floating(rounding.target) || rounding.target == kBool) {
    throw_error(ErrorKind::UnsupportedData, "weights cannot be quantized to {}", type_name(rounding.target));
  }
  return rounding;
}

Elementwise by_tensor(const Step& step, const TensorView& tensor) {
  const Rounding rounding = rounding_of(step, int_of(step, 0));
  const auto inverse = static_cast<float>(1.0 / float_of(step, 0));
  return {
      rounding.target,
      [=, floats = Floats(tensor)](uint64_t begin, uint64_t end, uint8_t* to) mutable {
        quantize(rounding, floats.part(begin, end), end - begin, Factor{inverse}, to);
      },
      nullptr};
}

Elementwise by_channel(const Step& step, const TensorView& tensor, const Lookup& lookup) {
  const Rounding rounding = rounding_of(step, 0);
  std::vector<float> inverses = scales_of(step, lookup);
  for (float& scale : inverses) {
    scale = 1.0f / scale;
  }
  const Channels channels(tensor.sizes, int_of(step, 0));
  if (inverses.size() == 1 && channels.count != 1) {
    inverses.assign(channels.count, inverses[0]);
  }
  if (inverses.size() != channels.count) {
    throw_misfit(tensor, inverses.size());
  }
  const size_t item = item_size(rounding.target);
  const auto fill = [=, floats = Floats(tensor)](uint64_t begin, uint64_t end, uint8_t* to) mutable {
    const uint8_t* from = floats.part(begin, end);
    channels.visit(
        begin,
        end,
        [&](uint64_t at, uint64_t n, uint64_t channel) {
          quantize(rounding, from + 4 * (at - begin), n, Factor{inverses[channel]}, to + item * (at - begin));
        },
        [&](uint64_t at, uint64_t n, uint64_t channel) {
          const Factors factors{inverses.data() + channel};
          quantize(rounding, from + 4 * (at - begin), n, factors, to + item * (at - begin));
        });
  };
  return {rounding.target, fill, nullptr, rounding.low >= -8 && rounding.high <= 7};
}

Elementwise by_group(const Step& step, const TensorView& tensor, const Lookup& lookup) {
  const Rounding rounding = rounding_of(step, 0);
  const std::vector<float> scales = scales_of(step, lookup);
  const int64_t group = int_of(step, 0);
  const size_t rank = tensor.sizes.size();
  if (group <= 0 || rank != 2 || tensor.sizes[1] % group != 0 ||
      scales.size() != count({tensor.sizes[0], tensor.sizes[1] / group})) {
    throw_misfit(tensor, scales.size());
  }
  const auto width = static_cast<uint64_t>(group);
  const size_t item = item_size(rounding.target);
  const auto fill = [=, floats = Floats(tensor)](uint64_t begin, uint64_t end, uint8_t* to) mutable {
    const uint8_t* from = floats.part(begin, end);
    for (uint64_t at = begin; at < end; at += width) {
      const float scale = scales[at / width];
      uint8_t* out = to + item * (at - begin);
      if (scale == 0) { // of a group of zeros
        const float none = 0;
        for (uint64_t i = 0; i < width; ++i) {
          quantize(rounding, reinterpret_cast<const uint8_t*>(&none), 1, Factor{1}, out + item * i);
        }
      } else {
        quantize(rounding, from + 4 * (at - begin), width, Factor{1.0f / scale}, out);
      }
    }
  };
  return {rounding.target, fill, nullptr, rounding.low >= -8 && rounding.high <= 7};
}

Elementwise fold_weight(const Step& step, const std::vector<TensorView>& tensors) {
  const bool has_gamma = int_of(step, 1) != 0;
  check_folded(step, tensors, has_gamma ? 3 : 2);
  const TensorView& weight = tensors[0];
  std::vector<float> scales = deviations(tensors[1], float_of(step, 0));
  const Channels channels(weight.sizes, int_of(step, 0));
  if (scales.size() != channels.count || (has_gamma && tensors[2].nbytes != tensors[1].nbytes)) {
    throw_misfit(weight, scales.size());
  }
  for (size_t i = 0; has_gamma && i < scales.size(); ++i) {
    scales[i] = load<float>(tensors[2].data + 4 * i) * scales[i];
  }
  const uint8_t* from = weight.data;
  const auto fill = [=](uint64_t begin, uint64_t end, uint8_t* to) {
    channels.visit(
        begin,
        end,
        [&](uint64_t at, uint64_t n, uint64_t channel) {
          multiply(from + 4 * at, n, Factor{scales[channel]}, to + 4 * (at - begin));
        },
        [&](uint64_t at, uint64_t n, uint64_t channel) {
          multiply(from + 4 * at, n, Factors{scales.data() + channel}, to + 4 * (at - begin));
        });
  };
  if (channels.count != static_cast<uint64_t>(weight.sizes[0]) ||
      channels.count * channels.inner != count(weight.sizes)) {
    return {kFloat, fill, nullptr};
  }
  const auto fill_moved = [=](uint64_t begin, uint64_t end, uint64_t columns, uint64_t area, uint8_t* to) {
    const uint64_t row = 4 * columns * area;
    for (uint64_t i = begin; i < end; ++i) {
      transpose<true>(from + i * row, to + (i - begin) * row, area, columns, area, scales[i]);
    }
  };
  return {kFloat, fill, fill_moved};
}

} // namespace

bool is_elementwise(Operation operation) {
  return operation == Operation::QuantizeTensor || operation == Operation::QuantizeChannel ||
      operation == Operation::QuantizeGroup || operation == Operation::FoldConvWeight ||
      operation == Operation::FoldLinearWeight;
}

Elementwise prepare(const Step& step, const std::vector<TensorView>& tensors, const Lookup& lookup) {
  switch (step.operation) {
    case Operation::QuantizeTensor:
      return by_tensor(step, tensors.at(0));
    case Operation::QuantizeChannel:
      return by_channel(step, tensors.at(0), lookup);
    case Operation::QuantizeGroup:
      return by_group(step, tensors.at(0), lookup);
    default:
      return fold_weight(step, tensors);
  }
}

std::vector<float> scales_of(const Step& step, const Lookup& lookup) {
  if (step.names.empty()) {
    throw_lacking(step, "has no scales");
  }
  const TensorView blob = lookup(step.names[0]);
  const bool is_stored = step.operation == Operation::QuantizeGroup && blob.scalar_type != kFloat;
  const int8_t type = is_stored ? kBFloat16 : kFloat;
  std::vector<float> scales(blob.nbytes / item_size(type));
  to_floats(type, blob.data, scales.size(), scales.data());
  return scales;
}

int64_t int_of(const Step& step, size_t index) {
  if (index >= step.ints.size()) {
    throw_lacking(step, "lacks a number");
  }
  return step.ints[index];
}

double float_of(const Step& step, size_t index) {
  if (index >= step.floats.size()) {
    throw_lacking(step, "lacks a number");
  }
  return step.floats[index];
}

int8_t target_of(const Step& step) {
  const int64_t type = int_of(step, step.ints.size() - 1);
  return type >= 0 && type <= 127 ? static_cast<int8_t>(type) : int8_t{-1};
}

void check_folded(const Step& step, const std::vector<TensorView>& tensors, size_t least) {
  for (const TensorView& tensor : tensors) {
    if (tensor.scalar_type != kFloat) {
      throw_error(
          ErrorKind::UnsupportedData,
          "batch normalization can be folded only in float32, found {}",
          type_name(tensor.scalar_type));
    }
  }
  if (tensors.size() < least) {
    throw_lacking(step, "lacks a tensor");
  }
}

std::vector<float> deviations(const TensorView& variance, double epsilon) {
  std::vector<float> inverse(variance.nbytes / 4);
  for (size_t i = 0; i < inverse.size(); ++i) {
    inverse[i] = 1.0f / std::sqrt(load<float>(variance.data + 4 * i) + static_cast<float>(epsilon));
  }
  return inverse;
}

} // namespace blobstore::internal
