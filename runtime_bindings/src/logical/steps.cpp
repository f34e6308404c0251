#include "logical/steps.h"

#include <algorithm>
#include <cmath>

#include <blobstore/error.h>
#include <blobstore/layout.h>

#include "logical/elementwise.h"
#include "logical/numbers.h"
#include "logical/reorder.h"
#include "os/text.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

constexpr uint64_t kBlock = 1 << 12; // numbers that steps on rows work on together, to stay in the processor's cache

TensorView reshaped(const TensorView& tensor, const std::vector<int64_t>& sizes) {
  if (count(tensor.sizes) != count(sizes)) {
    throw_error(
        ErrorKind::Layout, "a tensor of shape {} cannot have the shape {}", to_string(tensor.sizes), to_string(sizes));
  }
  TensorView out = tensor;
  out.sizes = sizes;
  return out;
}

TensorView swap_in_out(const Step& step, const TensorView& tensor) {
  const int64_t groups = int_of(step, 0);
  const std::vector<int64_t>& sizes = tensor.sizes;
  if (sizes.size() < 2 || groups <= 0 || sizes[0] % groups != 0) {
    throw_error(ErrorKind::Layout, "a tensor of shape {} has no {} groups", to_string(sizes), groups);
  }
  const int64_t in = sizes[0] / groups;
  const int64_t out = sizes[1];
  std::vector<int64_t> swapped(sizes);
  swapped[0] = out * groups;
  swapped[1] = in;
  TensorView made = make_tensor(tensor.scalar_type, swapped);
  uint64_t rest = 1;
  for (size_t i = 2; i < sizes.size(); ++i) {
    rest *= static_cast<uint64_t>(sizes[i]);
  }
  const auto ins = static_cast<uint64_t>(in);
  const auto outs = static_cast<uint64_t>(out);
  gather(
      tensor.data,
      filling(made),
      item_size(tensor.scalar_type),
      {static_cast<uint64_t>(groups), outs, ins, rest},
      {ins * outs * rest, rest, outs * rest, 1});
  return made;
}

/// The sizes of a tensor with its channels last. @throws Error Layout: it has not four dimensions.
std::vector<int64_t> channels_last_sizes(const std::vector<int64_t>& sizes) {
  if (sizes.size() != 4) {
    throw_error(ErrorKind::Layout, "a tensor of shape {} has no channels in front of two others", to_string(sizes));
  }
  return {sizes[0], sizes[2], sizes[3], sizes[1]};
}

/// Move the channels of some rows behind the others. @param sizes of the tensor before.
void move_channels(const std::vector<int64_t>& sizes, uint64_t rows, size_t item, const uint8_t* from, uint8_t* to) {
  const auto channels = static_cast<uint64_t>(sizes[1]);
  const uint64_t area = static_cast<uint64_t>(sizes[2]) * static_cast<uint64_t>(sizes[3]);
  gather(from, to, item, {rows, area, channels}, {channels * area, 1, area});
}

TensorView channels_last(const TensorView& tensor) {
  TensorView out = make_tensor(tensor.scalar_type, channels_last_sizes(tensor.sizes));
  move_channels(
      tensor.sizes, static_cast<uint64_t>(tensor.sizes[0]), item_size(tensor.scalar_type), tensor.data, filling(out));
  return out;
}

/// The tensor as a matrix: as it is, or without dimensions of one element.
std::vector<int64_t> matrix_sizes(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> wide;
  std::copy_if(sizes.begin(), sizes.end(), std::back_inserter(wide), [](int64_t size) { return size != 1; });
  const std::vector<int64_t>& matrix = sizes.size() == 2 ? sizes : wide;
  if (matrix.size() != 2) {
    throw_error(ErrorKind::Layout, "a tensor of shape {} is not a matrix", to_string(sizes));
  }
  return matrix;
}

void check_int4(const TensorView& tensor) {
  if (tensor.scalar_type != kChar && tensor.scalar_type != kByte) {
    throw_error(
        ErrorKind::UnsupportedData, "only integers of one byte can be packed, found {}", type_name(tensor.scalar_type));
  }
  const bool is_signed = tensor.scalar_type == kChar;
  const uint8_t zero = is_signed ? 8 : 0;
  const uint8_t range = is_signed ? 0xf0 : 0xf8;
  uint8_t outside = 0;
  for (size_t i = 0; i < tensor.nbytes; ++i) {
    const uint8_t shifted = static_cast<uint8_t>(tensor.data[i] + zero);
    outside = static_cast<uint8_t>(outside | (shifted & range));
  }
  if (outside != 0) {
    throw_error(ErrorKind::UnsupportedData, "numbers of four bits must be in -8 \xe2\x80\xa6 7");
  }
}

/// Pack rows of checked numbers.
void pack_rows(uint64_t rows, uint64_t width, const uint8_t* from, uint8_t* to) {
  const uint64_t pairs = width / 2;
  for (uint64_t row = 0; row < rows; ++row, from += width, to += (width + 1) / 2) {
    const uint8_t* __restrict numbers = from;
    uint8_t* __restrict packed = to;
    for (uint64_t i = 0; i < pairs; ++i) {
      const unsigned both = load<uint16_t>(numbers + 2 * i) ^ 0x0808u; // adds 8 to each number of four bits
      packed[i] = static_cast<uint8_t>((both & 0xf) | (both >> 4 & 0xf0));
    }
    if (width % 2 != 0) {
      packed[pairs] = static_cast<uint8_t>(((numbers[width - 1] ^ 8) & 0xf) | 0x80);
    }
  }
}

TensorView pack_int4(const TensorView& tensor) {
  check_int4(tensor);
  const std::vector<int64_t> sizes = matrix_sizes(tensor.sizes);
  TensorView out = make_tensor(kByte, {sizes[0], (sizes[1] + 1) / 2});
  pack_rows(static_cast<uint64_t>(sizes[0]), static_cast<uint64_t>(sizes[1]), tensor.data, filling(out));
  return out;
}

/// Steps behind an elementwise one that keep rows apart.
struct RowSteps {
  std::vector<int64_t> sizes; // of the result
  bool moves = false; // channels become the last dimension
  bool packs = false; // to four bits
};

/// @param next the first step behind; moved behind those that were taken.
RowSteps take_row_steps(
    const Elementwise& first, const std::vector<int64_t>& sizes, const Step*& next, const Step* end) {
  RowSteps steps{sizes};
  if (next != end && next->operation == Operation::ChannelsLast) {
    steps.sizes = channels_last_sizes(sizes);
    steps.moves = true;
    ++next;
  }
  if (next != end && next->operation == Operation::PackInt4 && first.is_int4 && first.scalar_type == kChar) {
    const std::vector<int64_t> matrix = matrix_sizes(steps.sizes);
    if (matrix[0] == steps.sizes[0]) {
      steps.sizes = {matrix[0], (matrix[1] + 1) / 2};
      steps.packs = true;
      ++next;
    }
  }
  return steps;
}

/// @param moves, @param packs what follows the elementwise step.
void run_blocks(
    const Elementwise& first,
    const std::vector<int64_t>& sizes,
    bool moves,
    bool packs,
    uint64_t rows,
    uint64_t width,
    TensorView& out) {
  const size_t item = item_size(first.scalar_type);
  const uint64_t block = std::max<uint64_t>(1, kBlock / width);
  const uint64_t made_width = out.nbytes / rows;
  std::vector<uint8_t> filled(moves || packs ? block * width * item : 0);
  std::vector<uint8_t> moved(moves && packs ? filled.size() : 0);
  for (uint64_t row = 0; row < rows; row += block) {
    const uint64_t some = std::min(block, rows - row);
    uint8_t* to = filling(out) + row * made_width;
    uint8_t* at = moves || packs ? filled.data() : to;
    first.fill(row * width, (row + some) * width, at);
    if (moves) {
      uint8_t* channels_last = packs ? moved.data() : to;
      move_channels(sizes, some, item, at, channels_last);
      at = channels_last;
    }
    if (packs) {
      pack_rows(some, width, at, to);
    }
  }
}

/// Run an elementwise step, and with it the steps behind it that keep rows apart: each part of the tensor goes through
/// all of them while it is in the processor's cache.
///
/// @param next the first step behind it; moved behind those that were run.
TensorView run_rows(const Elementwise& first, const TensorView& tensor, const Step*& next, const Step* end) {
  const std::vector<int64_t>& sizes = tensor.sizes;
  const uint64_t numbers = count(sizes);
  const uint64_t rows = sizes.empty() ? 1 : static_cast<uint64_t>(sizes[0]);
  const uint64_t width = rows == 0 ? 0 : numbers / rows;
  const RowSteps behind = take_row_steps(first, sizes, next, end);
  const bool packs = behind.packs;
  TensorView out = make_tensor(packs ? static_cast<int8_t>(kByte) : first.scalar_type, behind.sizes);
  if (numbers == 0) {
    return out;
  }
  const uint64_t channels = behind.moves ? static_cast<uint64_t>(sizes[1]) : width;
  if (channels != width && !packs && first.fill_moved) {
    first.fill_moved(0, rows, channels, width / channels, filling(out));
    return out;
  }
  run_blocks(first, sizes, behind.moves && channels != width, packs, rows, width, out);
  return out;
}

void check_parts(const TensorView& one, const TensorView& other) {
  if (one.nbytes != other.nbytes) {
    throw_error(
        ErrorKind::Layout,
        "a normalization has parts of shapes {} and {}",
        to_string(one.sizes),
        to_string(other.sizes));
  }
}

/// The optional tensors of a step, behind `required` others; null for each that is not present.
std::vector<const uint8_t*> optional(
    const Step& step, const std::vector<TensorView>& tensors, size_t required, size_t most) {
  std::vector<const uint8_t*> found(most, nullptr);
  size_t next = required;
  for (size_t i = 0; i < most; ++i) {
    if (int_of(step, i) != 0) {
      check_folded(step, tensors, next + 1);
      check_parts(tensors[0], tensors[next]);
      found[i] = tensors[next++].data;
    }
  }
  return found;
}

float number(const uint8_t* numbers, size_t index, float otherwise) {
  return numbers == nullptr ? otherwise : load<float>(numbers + 4 * index);
}

void check_mean_and_variance(const Step& step, const std::vector<TensorView>& tensors) {
  check_folded(step, tensors, 2);
  check_parts(tensors[0], tensors[1]);
}

TensorView fold_bias(const Step& step, const std::vector<TensorView>& tensors) {
  check_mean_and_variance(step, tensors);
  const std::vector<const uint8_t*> parts = optional(step, tensors, 2, 3);
  const std::vector<float> deviation = deviations(tensors[1], float_of(step, 0));
  const bool is_conv = step.operation == Operation::FoldConvBias;
  TensorView out = make_tensor(kFloat, tensors[0].sizes);
  for (size_t i = 0; i < deviation.size(); ++i) {
    const float centered = number(parts[0], i, 0) - number(tensors[0].data, i, 0);
    const float gamma = number(parts[1], i, 1);
    // torch multiplies in another order for a convolution than for a linear layer, and so rounds differently
    const float scaled = is_conv ? centered * deviation[i] * gamma : centered * (gamma * deviation[i]);
    store(filling(out) + 4 * i, scaled + number(parts[2], i, 0));
  }
  return out;
}

/// In float64, rounded once.
TensorView norm(const Step& step, const std::vector<TensorView>& tensors) {
  check_mean_and_variance(step, tensors);
  const std::vector<const uint8_t*> parts = optional(step, tensors, 2, 2);
  const double epsilon = static_cast<float>(float_of(step, 0));
  TensorView out = make_tensor(kFloat, tensors[0].sizes);
  for (size_t i = 0; i < out.nbytes / 4; ++i) {
    const double mean = number(tensors[0].data, i, 0);
    const double deviation = std::sqrt(number(tensors[1].data, i, 0) + epsilon);
    const double scale = number(parts[0], i, 1);
    const double result = step.operation == Operation::NormWeight ? scale / deviation
                                                                  : -mean * scale / deviation + number(parts[1], i, 0);
    store(filling(out) + 4 * i, static_cast<float>(result));
  }
  return out;
}

TensorView run(const Step& step, const std::vector<TensorView>& tensors) {
  const TensorView& tensor = tensors.at(0);
  switch (step.operation) {
    case Operation::Reshape:
      return reshaped(tensor, step.ints);
    case Operation::Cast: {
      const int8_t target = target_of(step);
      if (!is_number(target)) {
        throw_error(ErrorKind::UnsupportedData, "weights cannot be cast to type {}", type_name(target));
      }
      return cast(tensor, target);
    }
    case Operation::SwapInOut:
      return swap_in_out(step, tensor);
    case Operation::ChannelsLast:
      return channels_last(tensor);
    case Operation::PackInt4:
      return pack_int4(tensor);
    case Operation::FoldConvBias:
    case Operation::FoldLinearBias:
      return fold_bias(step, tensors);
    default:
      return norm(step, tensors);
  }
}

} // namespace

bool is_quantization(Operation operation) {
  return operation == Operation::QuantizeTensor || operation == Operation::QuantizeChannel ||
      operation == Operation::QuantizeGroup;
}

const Step* scaled_step(const Record& record) {
  for (const Step& step : record.steps) {
    if (is_quantization(step.operation) && !step.names.empty()) {
      return &step;
    }
  }
  return nullptr;
}

bool is_quantized_bias(const Record& record) {
  const Step* step = scaled_step(record);
  return step != nullptr && !step->ints.empty() && step->ints.back() == kInt;
}

bool accepts(const Record& record, const SourceTensor& source, int8_t scalar_type) {
  if (scalar_type == source.scalar_type) {
    return true;
  }
  return record.sources.size() == 1 && std::any_of(record.steps.begin(), record.steps.end(), [&](const Step& step) {
           return is_quantization(step.operation) && target_of(step) == scalar_type;
         });
}

TensorView lay_out(
    const Record& record,
    const std::vector<TensorView>& tensors,
    const Lookup& lookup,
    const BeforeQuantizing& before_quantizing) {
  if (tensors.empty()) {
    throw_error(ErrorKind::UnsupportedData, "blob '{}' is made of nothing", record.key);
  }
  std::vector<TensorView> values = tensors;
  const Step* end = record.steps.data() + record.steps.size();
  for (const Step* step = record.steps.data(); step != end;) {
    const Step& now = *step++;
    if (is_quantization(now.operation) && values[0].scalar_type == target_of(now)) {
      values.resize(1); // already quantized
    } else if (is_elementwise(now.operation)) {
      if (before_quantizing && is_quantization(now.operation)) {
        before_quantizing(now, values[0]);
      }
      values = {run_rows(prepare(now, values, lookup), values[0], step, end)};
    } else {
      values = {run(now, values)};
    }
  }
  if (values[0].nbytes != record.nbytes) {
    throw_error(
        ErrorKind::Layout,
        "blob '{}': expected {} bytes, its steps give {}",
        record.key,
        record.nbytes,
        values[0].nbytes);
  }
  return values[0];
}

TensorView restore(const Record& record, const uint8_t* data, size_t size) {
  const SourceTensor& source = record.sources.at(0);
  int8_t type = source.scalar_type;
  for (const Step& step : record.steps) {
    if (step.operation == Operation::Cast) {
      type = target_of(step);
    } else if (step.operation != Operation::Reshape || record.sources.size() > 1) {
      throw_error(
          ErrorKind::Update,
          "'{}' cannot be read back from its blob '{}', which was made by: {}",
          source.name,
          record.key,
          to_string(step.operation));
    }
  }
  if (!is_number(type) || record.nbytes != size) {
    throw_error(
        ErrorKind::Update, "'{}' cannot be read back from its blob '{}' of {} bytes", source.name, record.key, size);
  }
  uint64_t expected = 0;
  try {
    expected = count(source.sizes);
  } catch (const Error&) {
    expected = UINT64_MAX;
  }
  if (expected != size / item_size(type) || size % item_size(type) != 0) {
    throw_error(
        ErrorKind::Update,
        "'{}' is {}, its blob '{}' has {} numbers",
        source.name,
        to_string(source.sizes),
        record.key,
        size / item_size(type));
  }
  return {type, source.sizes, data, size, nullptr};
}

} // namespace blobstore::internal
