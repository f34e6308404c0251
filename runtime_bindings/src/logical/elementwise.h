// Steps that compute each number of the result from one number of the tensor: quantization, and folding into weights.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "format/records.h"
#include "format/tensor_view.h"

namespace blobstore::internal {

/// Returns the bytes of another blob by its key: the scales that weights are quantized with.
using Lookup = std::function<TensorView(const std::string& key)>;

/// A step that is ready to run on parts of a tensor.
struct Elementwise {
  int8_t scalar_type = 0; // of the result, which has the sizes of the tensor
  /// Write the numbers `begin` to `end` of the result to `to`. Both are multiples of the elements of a row: of all
  /// dimensions but the first. Refers to the tensors.
  std::function<void(uint64_t begin, uint64_t end, uint8_t* to)> fill;
  /// If not empty: write rows `begin` to `end`, each of which is a matrix of `channels` rows and `area` columns, with
  /// all of these transposed.
  std::function<void(uint64_t begin, uint64_t end, uint64_t channels, uint64_t area, uint8_t* to)> fill_moved;
  bool is_int4 = false; // whether all results are numbers of four bits
};

/// Whether `prepare` takes a step.
bool is_elementwise(Operation operation);

/// @throws as `lay_out`.
Elementwise prepare(const Step& step, const std::vector<TensorView>& tensors, const Lookup& lookup);

// What a step says. @throws Error UnsupportedData: it says too little.
int64_t int_of(const Step& step, size_t index);
double float_of(const Step& step, size_t index);
/// The type of a step's result, which is its last integer.
int8_t target_of(const Step& step);

/// The scales of channels or groups. A blob of float32 is taken as such, also where the stored ones are bfloat16.
std::vector<float> scales_of(const Step& step, const Lookup& lookup);

/// The float32 tensors of a fold. @throws Error UnsupportedData: there are fewer, or one has another type.
void check_folded(const Step& step, const std::vector<TensorView>& tensors, size_t least);
/// 1 / sqrt(variance + epsilon), in float32.
std::vector<float> deviations(const TensorView& variance, double epsilon);

} // namespace blobstore::internal
