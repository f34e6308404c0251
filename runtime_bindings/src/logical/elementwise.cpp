#include "logical/elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <blobstore/error.h>
#include <blobstore/layout.h>

#include "logical/numbers.h"

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
};

constexpr float kNearest = 0x1.8p23f; // the sum of this and a number below 2^22 ends with the nearest integer
constexpr int32_t kNearestBits = 0x4b400000;

/// An integer of one byte; see Rounding::is_small.
struct SmallRounder {
  explicit SmallRounder(const Rounding& rounding)
      : low(static_cast<float>(rounding.low - rounding.zero)),
        high(static_cast<float>(rounding.high - rounding.zero)),
        zero(static_cast<int32_t>(rounding.zero) - kNearestBits) {}

  uint8_t operator()(float scaled) const {
    float limited = scaled < low ? low : scaled;
    limited = limited > high ? high : limited;
    const float sum = limited + kNearest;
    int32_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    const int32_t rounded = static_cast<int32_t>(static_cast<uint32_t>(bits) + static_cast<uint32_t>(zero));
    return static_cast<uint8_t>(scaled == scaled ? rounded : 0);
  }

  float low;
  float high;
  int32_t zero;
};

/// Any integer.
struct WideRounder {
  explicit WideRounder(const Rounding& rounding) : about(rounding) {}

  int64_t operator()(float scaled) const {
    float sum = std::nearbyint(scaled);
    if (about.zero != 0) {
      sum += static_cast<float>(about.zero);
    }
    if (sum != sum) {
      return about.target == kInt ? std::numeric_limits<int32_t>::min() : 0;
    }
    // float32 cannot represent 2**31 - 1
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

/// Quantize numbers; `inverse(i)` is what number i is multiplied with.
template <typename Inverse>
void quantize(
    const Rounding& rounding, const uint8_t* __restrict from, size_t count, uint8_t* __restrict to, Inverse inverse) {
  if (rounding.is_small()) {
    const SmallRounder round(rounding);
    for (size_t i = 0; i < count; ++i) {
      to[i] = round(load<float>(from + 4 * i) * inverse(i));
    }
    return;
  }
  const WideRounder round(rounding);
  const size_t item = item_size(rounding.target);
  for (size_t i = 0; i < count; ++i) {
    const int64_t rounded = round(load<float>(from + 4 * i) * inverse(i));
    std::memcpy(to + item * i, &rounded, item); // the low bytes come first
  }
}

/// A tensor as runs of `inner` numbers, each of which belongs to one of `count` channels.
struct Channels {
  uint64_t count = 1;
  uint64_t inner = 1;

  Channels(const std::vector<int64_t>& sizes, int64_t axis) {
    const auto rank = static_cast<int64_t>(sizes.size());
    axis += axis < 0 ? rank : 0;
    if (axis < 0 || axis >= rank) {
      throw Error(ErrorKind::Layout, "a tensor of shape " + to_string(sizes) + " has no axis " + std::to_string(axis));
    }
    count = static_cast<uint64_t>(sizes[static_cast<size_t>(axis)]);
    for (size_t i = static_cast<size_t>(axis) + 1; i < sizes.size(); ++i) {
      inner *= static_cast<uint64_t>(sizes[i]);
    }
  }

  /// Call `one(at, n, channel)` for runs of one channel, or `each(at, n, channel)` for runs of n channels.
  template <typename One, typename Each>
  void visit(uint64_t begin, uint64_t end, One one, Each each) const {
    for (uint64_t at = begin; at < end;) {
      if (inner > 1) {
        one(at, inner, at / inner % count);
        at += inner;
      } else {
        const uint64_t channel = at % count;
        const uint64_t n = std::min(count - channel, end - at);
        each(at, n, channel);
        at += n;
      }
    }
  }
};

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

Error misfit(const TensorView& tensor, size_t scales) {
  return Error(
      ErrorKind::Layout,
      "a tensor of shape " + to_string(tensor.sizes) + " does not fit " + std::to_string(scales) + " scales");
}

Rounding rounding_of(const Step& step, int64_t zero) {
  const size_t count = step.ints.size();
  const Rounding rounding{target_of(step), zero, int_of(step, count - 3), int_of(step, count - 2)};
  if (!is_number(rounding.target) || is_floating(rounding.target) || rounding.target == kBool) {
    throw Error(ErrorKind::UnsupportedData, "weights cannot be quantized to " + type_name(rounding.target));
  }
  return rounding;
}

std::vector<float> scales_of(const Step& step, const Lookup& lookup, int8_t type) {
  if (step.names.empty()) {
    throw Error(ErrorKind::UnsupportedData, std::string(to_string(step.operation)) + " has no scales");
  }
  const TensorView blob = lookup(step.names[0]);
  std::vector<float> scales(blob.nbytes / item_size(type));
  to_floats(type, blob.data, scales.size(), scales.data());
  return scales;
}

Elementwise by_tensor(const Step& step, const TensorView& tensor) {
  const Rounding rounding = rounding_of(step, int_of(step, 0));
  const auto inverse = static_cast<float>(1.0 / float_of(step, 0));
  return {rounding.target, [=, floats = Floats(tensor)](uint64_t begin, uint64_t end, uint8_t* to) mutable {
            quantize(rounding, floats.part(begin, end), end - begin, to, [=](size_t) { return inverse; });
          }};
}

Elementwise by_channel(const Step& step, const TensorView& tensor, const Lookup& lookup) {
  const Rounding rounding = rounding_of(step, 0);
  std::vector<float> inverses = scales_of(step, lookup, kFloat);
  for (float& scale : inverses) {
    scale = 1.0f / scale;
  }
  const Channels channels(tensor.sizes, int_of(step, 0));
  if (inverses.size() == 1 && channels.count != 1) {
    inverses.assign(channels.count, inverses[0]);
  }
  if (inverses.size() != channels.count) {
    throw misfit(tensor, inverses.size());
  }
  const size_t item = item_size(rounding.target);
  const auto fill = [=, floats = Floats(tensor)](uint64_t begin, uint64_t end, uint8_t* to) mutable {
    const uint8_t* from = floats.part(begin, end);
    channels.visit(
        begin,
        end,
        [&](uint64_t at, uint64_t n, uint64_t channel) {
          const float inverse = inverses[channel];
          quantize(rounding, from + 4 * (at - begin), n, to + item * (at - begin), [=](size_t) { return inverse; });
        },
        [&](uint64_t at, uint64_t n, uint64_t channel) {
          const float* inverse = inverses.data() + channel;
          quantize(
              rounding, from + 4 * (at - begin), n, to + item * (at - begin), [=](size_t i) { return inverse[i]; });
        });
  };
  return {rounding.target, fill, rounding.low >= -8 && rounding.high <= 7};
}

Elementwise by_group(const Step& step, const TensorView& tensor, const Lookup& lookup) {
  const Rounding rounding = rounding_of(step, 0);
  const std::vector<float> scales = scales_of(step, lookup, kBFloat16);
  const int64_t group = int_of(step, 0);
  const size_t rank = tensor.sizes.size();
  if (group <= 0 || rank != 2 || tensor.sizes[1] % group != 0 ||
      scales.size() != count({tensor.sizes[0], tensor.sizes[1] / group})) {
    throw misfit(tensor, scales.size());
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
          quantize(rounding, reinterpret_cast<const uint8_t*>(&none), 1, out + item * i, [](size_t) { return 1.0f; });
        }
      } else {
        const float inverse = 1.0f / scale;
        quantize(rounding, from + 4 * (at - begin), width, out, [=](size_t) { return inverse; });
      }
    }
  };
  return {rounding.target, fill, rounding.low >= -8 && rounding.high <= 7};
}

void multiply(const uint8_t* __restrict from, size_t count, float factor, uint8_t* __restrict to) {
  for (size_t i = 0; i < count; ++i) {
    store(to + 4 * i, load<float>(from + 4 * i) * factor);
  }
}

Elementwise fold_weight(const Step& step, const std::vector<TensorView>& tensors) {
  const bool has_gamma = int_of(step, 1) != 0;
  check_folded(step, tensors, has_gamma ? 3 : 2);
  const TensorView& weight = tensors[0];
  std::vector<float> scales = deviations(tensors[1], float_of(step, 0));
  const Channels channels(weight.sizes, int_of(step, 0));
  if (scales.size() != channels.count || (has_gamma && tensors[2].nbytes != tensors[1].nbytes)) {
    throw misfit(weight, scales.size());
  }
  for (size_t i = 0; has_gamma && i < scales.size(); ++i) {
    scales[i] = load<float>(tensors[2].data + 4 * i) * scales[i];
  }
  return {kFloat, [=](uint64_t begin, uint64_t end, uint8_t* to) {
            const uint8_t* from = weight.data;
            channels.visit(
                begin,
                end,
                [&](uint64_t at, uint64_t n, uint64_t channel) {
                  multiply(from + 4 * at, n, scales[channel], to + 4 * (at - begin));
                },
                [&](uint64_t at, uint64_t n, uint64_t channel) {
                  for (uint64_t i = 0; i < n; ++i) {
                    store(to + 4 * (at - begin + i), load<float>(from + 4 * (at + i)) * scales[channel + i]);
                  }
                });
          }};
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

int64_t int_of(const Step& step, size_t index) {
  if (index >= step.ints.size()) {
    throw Error(ErrorKind::UnsupportedData, std::string(to_string(step.operation)) + " lacks a number");
  }
  return step.ints[index];
}

double float_of(const Step& step, size_t index) {
  if (index >= step.floats.size()) {
    throw Error(ErrorKind::UnsupportedData, std::string(to_string(step.operation)) + " lacks a number");
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
      throw Error(
          ErrorKind::UnsupportedData,
          "batch normalization can be folded only in float32, found " + type_name(tensor.scalar_type));
    }
  }
  if (tensors.size() < least) {
    throw Error(ErrorKind::UnsupportedData, std::string(to_string(step.operation)) + " lacks a tensor");
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
