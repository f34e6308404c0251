#include "logical/scales.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

#include "logical/channels.h"
#include "logical/elementwise.h"
#include "logical/numbers.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

/// Call visit(begin, count, scale) for runs of numbers that are quantized with one scale.
template <typename Visit>
void by_scale(const Step& step, const std::vector<int64_t>& sizes, size_t scales, Visit visit) {
  const uint64_t numbers = count(sizes);
  if (scales == 1) {
    visit(0, numbers, 0);
  } else if (step.operation == Operation::QuantizeGroup) {
    const uint64_t width = numbers / scales;
    for (uint64_t i = 0; i < scales; ++i) {
      visit(i * width, width, i);
    }
  } else {
    Channels(sizes, int_of(step, 0)).visit(0, numbers, visit, [&](uint64_t at, uint64_t n, uint64_t channel) {
      for (uint64_t i = 0; i < n; ++i) {
        visit(at + i, 1, channel + i);
      }
    });
  }
}

/// @throws Error Layout: a tensor has another number of channels or groups than scales.
void check_fit(const Step& step, const std::vector<int64_t>& sizes, size_t scales) {
  const uint64_t numbers = count(sizes);
  bool fits = scales == 1;
  if (step.operation == Operation::QuantizeGroup) {
    const int64_t group = int_of(step, 0);
    fits = group > 0 && numbers == scales * static_cast<uint64_t>(group);
  } else if (!fits) {
    fits = Channels(sizes, int_of(step, 0)).count == scales;
  }
  if (!fits) {
    throw_error(ErrorKind::Layout, "a tensor of shape {} does not fit {} scales", to_string(sizes), scales);
  }
}

std::vector<float> largest_magnitudes(const Step& step, const TensorView& tensor, size_t scales) {
  const TensorView floats = cast(tensor, kFloat);
  std::vector<uint32_t> bits(scales, 0); // of magnitudes, which have the order of the numbers; NaN is the largest
  by_scale(step, floats.sizes, scales, [&](uint64_t at, uint64_t n, uint64_t scale) {
    uint32_t most = bits[scale];
    for (uint64_t i = at; i < at + n; ++i) {
      most = std::max(most, load<uint32_t>(floats.data + sizeof(float) * i) & 0x7fffffffu);
    }
    bits[scale] = most;
  });
  std::vector<float> largest(scales);
  std::transform(bits.begin(), bits.end(), largest.begin(), [](uint32_t most) {
    float number;
    std::memcpy(&number, &most, sizeof number);
    return number;
  });
  return largest;
}

/// The least and the greatest integer of a step.
std::pair<double, double> range_of(const Step& step) {
  const size_t last = step.ints.size();
  return {static_cast<double>(int_of(step, last - 3)), static_cast<double>(int_of(step, last - 2))};
}

/// The least scale that torch's quantizer for XNNPACK gives channels. torchao's own quantization has none of this size.
float least_scale(const Step& step, const std::vector<float>& stored) {
  constexpr float kLeast = 0x1p-12f;
  const auto [low, high] = range_of(step);
  const bool is_symmetric = step.operation == Operation::QuantizeChannel && low == -high;
  const bool has_least = std::none_of(stored.begin(), stored.end(), [](float scale) { return scale < kLeast; });
  return is_symmetric && has_least ? kLeast : std::numeric_limits<float>::min();
}

/// The scales that bfloat16 rounds to one of its numbers.
std::pair<double, double> rounded_to(float stored) {
  uint32_t bits;
  std::memcpy(&bits, &stored, sizeof bits);
  const double next = from_bfloat16(static_cast<uint16_t>((bits >> 16) + 1));
  const double before = from_bfloat16(static_cast<uint16_t>((bits >> 16) - 1));
  return {(before + stored) / 2, (next + stored) / 2};
}

/// Limit scales to those with which a number is rounded to an integer. @param clips whether the ends of the range stand
/// for all numbers outside of it, too. @returns whether there are such scales.
bool limit(double number, int integer, std::pair<double, double> range, bool clips, std::pair<double, double>& scales) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double low = clips && integer <= range.first ? -kInfinity : integer - 0.5;
  double high = clips && integer >= range.second ? kInfinity : integer + 0.5;
  if (number < 0) { // the same for its opposite
    number = -number;
    std::tie(low, high) = std::pair(-high, -low);
  }
  if (number == 0 || high <= 0) {
    return number == 0 && low <= 0 && high >= 0;
  }
  scales.first = std::max(scales.first, number / high);
  scales.second = low > 0 ? std::min(scales.second, number / low) : scales.second;
  return scales.first <= scales.second;
}

TensorView stored_form(const Step& step, const std::vector<float>& scales) {
  const TensorView floats = make_tensor(kFloat, {static_cast<int64_t>(scales.size())});
  if (!scales.empty()) {
    std::memcpy(filling(floats), scales.data(), floats.nbytes);
  }
  return step.operation == Operation::QuantizeGroup ? cast(floats, kBFloat16) : floats;
}

/// Keep the scales of groups whose stored integers follow from the new numbers.
/// @param packed integers of four bits. @param clips see `limit`. @param exact the scale that follows from each group's
///   numbers.
/// @returns whether all groups were kept.
bool keep_groups(
    const Step& step,
    const TensorView& numbers,
    const TensorView& packed,
    bool clips,
    const std::vector<float>& stored,
    std::vector<float>& exact) {
  const auto width = numbers.sizes.size() == 2 ? static_cast<uint64_t>(numbers.sizes[1]) : 0;
  if (width == 0 || packed.nbytes != count(numbers.sizes) / width * ((width + 1) / 2)) {
    return false;
  }
  const TensorView floats = cast(numbers, kFloat);
  bool all = true;
  by_scale(step, floats.sizes, stored.size(), [&](uint64_t at, uint64_t n, uint64_t group) {
    std::pair<double, double> scales = rounded_to(stored[group]);
    if (exact[group] == stored[group] || (exact[group] >= scales.first && exact[group] <= scales.second)) {
      return; // it is the same already
    }
    bool follows = std::isnormal(stored[group]);
    for (uint64_t i = at; i < at + n && follows; ++i) {
      const uint8_t pair = packed.data[i / width * ((width + 1) / 2) + i % width / 2];
      const int integer = (i % width % 2 == 0 ? pair & 0xf : pair >> 4) - 8;
      follows = limit(load<float>(floats.data + sizeof(float) * i), integer, range_of(step), clips, scales);
    }
    if (follows) {
      exact[group] = static_cast<float>((scales.first + scales.second) / 2);
    }
    all = all && follows;
  });
  return all;
}

} // namespace

TensorView Scales::find(const std::string& key) const {
  if (const auto given = given_.find(key); given != given_.end()) {
    return given->second;
  }
  if (const Computed* made = computed(key)) {
    const auto size = static_cast<int64_t>(made->exact.size());
    return {
        kFloat,
        {size},
        reinterpret_cast<const uint8_t*>(made->exact.data()),
        sizeof(float) * made->exact.size(),
        nullptr};
  }
  return stored(key);
}

const TensorView& Scales::stored(const std::string& key) const {
  auto found = stored_.find(key);
  if (found == stored_.end()) {
    found = stored_.emplace(key, read_(key)).first;
  }
  return found->second;
}

const Scales::Computed* Scales::computed(std::string_view key) const {
  const auto found =
      std::find_if(computed_.begin(), computed_.end(), [&](const Computed& one) { return one.key == key; });
  return found == computed_.end() ? nullptr : &*found;
}

std::vector<float> Scales::as_stored(const Step& step) const {
  return scales_of(step, [&](const std::string& key) { return stored(key); });
}

void Scales::compute(const Step& step, std::vector<float> exact) {
  Computed made{step.names[0], std::move(exact), {}, 0};
  made.bytes = stored_form(step, made.exact);
  const TensorView before = stored_form(step, as_stored(step));
  const size_t item = item_size(made.bytes.scalar_type);
  for (size_t at = 0; at < made.bytes.nbytes; at += item) {
    made.changed += std::memcmp(made.bytes.data + at, before.data + at, item) != 0 ? 1 : 0;
  }
  computed_.push_back(std::move(made));
}

bool Scales::choose(const Step& step, const TensorView& numbers, bool can_change, const TensorView& packed) {
  if (step.names.empty() || given_.count(step.names[0]) != 0 || computed(step.names[0]) != nullptr) {
    return false;
  }
  const Record* record = index_.record(step.names[0]);
  if (record != nullptr && !record->product_of.empty()) {
    if (is_new(record->product_of)) {
      multiply(step, *record);
    }
    return false;
  }
  if (!can_change) {
    return false;
  }
  const std::vector<float> before = as_stored(step);
  check_fit(step, numbers.sizes, before.size());
  const auto [low, high] = range_of(step);
  const auto half = static_cast<float>((high - low) / 2);
  const float least = least_scale(step, before);
  std::vector<float> exact = largest_magnitudes(step, numbers, before.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    const float scale = std::max(exact[i] / half, least);
    exact[i] = std::isfinite(scale) ? scale : before[i];
  }
  // Scales that were searched for may clip numbers. Where other groups changed, what is clipped may have grown.
  std::vector<float> kept = exact;
  if (keep_groups(step, numbers, packed, /*clips=*/true, before, kept)) {
    exact = std::move(kept);
  } else {
    keep_groups(step, numbers, packed, /*clips=*/false, before, exact);
  }
  compute(step, std::move(exact));
  return true;
}

bool Scales::is_new(std::string_view key) const {
  const Computed* made = computed(key);
  return given_.find(key) != given_.end() || (made != nullptr && made->changed != 0);
}

void Scales::multiply(const Step& step, const Record& product) {
  const TensorView weights = find(product.product_of);
  const auto factor = static_cast<float>(product.factor);
  std::vector<float> exact(weights.nbytes / sizeof(float));
  for (size_t i = 0; i < exact.size(); ++i) {
    exact[i] = load<float>(weights.data + sizeof(float) * i) * factor;
  }
  if (exact.size() != as_stored(step).size()) {
    throw_error(ErrorKind::Layout, "'{}' has another number of scales than '{}'", product.key, product.product_of);
  }
  compute(step, std::move(exact));
}

void Scales::keep(const Step& step) {
  const auto made =
      std::find_if(computed_.begin(), computed_.end(), [&](const Computed& one) { return one.key == step.names[0]; });
  const std::vector<float> before = as_stored(step);
  *made = {step.names[0], before, stored_form(step, before), 0};
}

uint64_t Scales::changed(const Step& step) const {
  const Computed* made = step.names.empty() ? nullptr : computed(step.names[0]);
  return made == nullptr ? 0 : made->changed;
}

std::vector<const Record*> Scales::follow() {
  std::vector<std::string> changed;
  for (const auto& one : given_) {
    changed.push_back(one.first);
  }
  for (const Computed& one : computed_) {
    changed.push_back(one.key);
  }
  std::vector<const Record*> left;
  for (const std::string& key : changed) {
    for (const Record* product : index_.products_of(key)) {
      const auto& biases = index_.quantized_with(product->key);
      if (!is_new(key) || biases.empty() || given_.count(product->key) != 0 || computed(product->key) != nullptr) {
        continue;
      }
      multiply(*scaled_step(*biases[0]), *product);
      if (computed_.back().changed != 0) {
        left.insert(left.end(), biases.begin(), biases.end());
      }
    }
  }
  return left;
}

uint64_t beyond(const Step& step, const TensorView& numbers, const Lookup& lookup) {
  const bool is_tensor = step.operation == Operation::QuantizeTensor;
  const std::vector<float> scales =
      is_tensor ? std::vector<float>{static_cast<float>(float_of(step, 0))} : scales_of(step, lookup);
  check_fit(step, numbers.sizes, scales.size());
  const double zero = is_tensor ? static_cast<double>(int_of(step, 0)) : 0;
  const auto [low, high] = range_of(step);
  // A number that is rounded moves by up to half a step; it is no worse off at the end of the range.
  constexpr double kHalf = 0.5001;
  const auto least = static_cast<float>(low - zero - kHalf);
  const auto greatest = static_cast<float>(high - zero + kHalf);
  const TensorView floats = cast(numbers, kFloat);
  uint64_t found = 0;
  by_scale(step, floats.sizes, scales.size(), [&](uint64_t at, uint64_t n, uint64_t scale) {
    const float inverse = scales[scale] == 0 ? 0 : 1.0f / scales[scale]; // 0: of a group of zeros
    uint32_t outside = 0;
    for (uint64_t i = at; i < at + n; ++i) {
      const float scaled = load<float>(floats.data + sizeof(float) * i) * inverse;
      outside += scaled >= least && scaled <= greatest ? 0 : 1;
    }
    found += outside;
  });
  return found;
}

TensorView rescale(const TensorView& integers, const std::vector<float>& before, const std::vector<float>& after) {
  using Limits = std::numeric_limits<int32_t>;
  const TensorView out = make_tensor(kInt, {static_cast<int64_t>(integers.nbytes / sizeof(int32_t))});
  for (size_t i = 0; i < out.nbytes / sizeof(int32_t); ++i) {
    const size_t scale = before.size() == 1 ? 0 : i;
    const double number = load<int32_t>(integers.data + sizeof(int32_t) * i) * static_cast<double>(before.at(scale));
    const double rounded = std::nearbyint(number / static_cast<double>(after.at(scale)));
    const double limited = rounded > Limits::min() ? std::min<double>(rounded, Limits::max()) : Limits::min();
    store(filling(out) + sizeof(int32_t) * i, static_cast<int32_t>(limited));
  }
  return out;
}

} // namespace blobstore::internal
