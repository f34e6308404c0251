// From the tensors of a model to the bytes of a stored blob, exactly as lowering made them, to the bit.
//
//   Reshape          ints: sizes
//   Cast             ints: type
//   QuantizeTensor   floats: scale; ints: zero point, least, greatest, type
//   QuantizeChannel  names: the blob of scales (float); ints: axis, least, greatest, type
//   QuantizeGroup    names: the blob of scales (bfloat16); ints: group size, least, greatest, type
//   SwapInOut        ints: groups. (in, out/groups, ...) becomes (out, in/groups, ...)
//   ChannelsLast     (n, c, h, w) becomes (n, h, w, c)
//   PackInt4         numbers of -8 ... 7, plus 8, two in a byte, the first in the low half; rows of odd length get a 0
//   Fold...Weight    sources: weight, variance, gamma if present; floats: epsilon; ints: axis of the output channels,
//                    whether gamma is present
//   Fold...Bias      sources: mean, variance, then bias, gamma, beta if present; floats: epsilon; ints: which are
//   present Norm...          a normalization without a layer before it, as a depthwise convolution with a kernel of one
//   element;
//                    sources: mean, variance, then gamma, beta if present; floats: epsilon; ints: which are present
//
// A tensor that has the type which a step quantizes to is taken as the integers that are stored.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "format/records.h"
#include "format/tensor_view.h"
#include "logical/elementwise.h"

namespace blobstore::internal {

/// Whether a source can be given in this dtype: its own, or the one that it is quantized to.
bool accepts(const Record& record, const SourceTensor& source, int8_t scalar_type);

/// Is shown the numbers that a step is about to quantize, before it looks its scales up.
using BeforeQuantizing = std::function<void(const Step& step, const TensorView& numbers)>;

/// Whether a step quantizes.
bool is_quantization(Operation operation);
/// The step of a record that quantizes with scales of a blob of their own, or nullptr.
const Step* scaled_step(const Record& record);
/// Whether a blob is a bias with such scales: integers of four bytes, which operators add to sums of products.
bool is_quantized_bias(const Record& record);

/// The blob of a record.
///
/// @param tensors one for each of its sources, in the source's shape.
/// @returns bytes; a view of a tensor, with its owner, if the tensor's bytes are the blob already.
/// @throws Error Layout: the result does not have the size of the blob, or the shapes do not fit the steps.
///   UnsupportedData: a step cannot take this dtype.
TensorView lay_out(
    const Record& record,
    const std::vector<TensorView>& tensors,
    const Lookup& lookup,
    const BeforeQuantizing& before_quantizing = nullptr);

/// The tensor that a blob was made of, in the dtype that it is stored in: a view of the bytes.
/// @throws Error Update: the blob does not contain the tensor, because it is made of several, or was quantized or
/// packed.
TensorView restore(const Record& record, const uint8_t* data, size_t size);

} // namespace blobstore::internal
