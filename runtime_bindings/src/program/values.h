// ExecuTorch's values: their kinds, what a method takes, and copies that own their memory.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/executor/method_meta.h>

#include <blobstore/layout.h>
#include <blobstore/program.h>

namespace blobstore::internal {

/// What a method takes as an input or returns as an output.
struct ValueInfo {
  std::optional<executorch::runtime::Tag> tag; // empty if ExecuTorch cannot say
  Layout layout; // of a tensor; for a size that may vary, the largest
  std::string name; // as recorded in the program; often empty

  bool is_tensor() const { return tag == executorch::runtime::Tag::Tensor; }
};

/// For messages: "a tensor".
const char* name_of(std::optional<executorch::runtime::Tag> tag);
std::string describe(executorch::runtime::Error error);

std::vector<ValueInfo> input_infos(const executorch::runtime::MethodMeta& method);
std::vector<ValueInfo> output_infos(const executorch::runtime::MethodMeta& method);

/// Whether both tensors, of equal sizes, have their elements in the same order in memory.
bool same_order(const executorch::aten::Tensor& one, const executorch::aten::Tensor& other);
/// A tensor of a fixed shape over memory on the CPU. @param deleter is destroyed, called or not, with the tensor.
executorch::extension::TensorPtr fixed_tensor(
    std::vector<executorch::aten::SizesType> sizes,
    void* data,
    std::vector<executorch::aten::DimOrderType> dim_order,
    std::vector<executorch::aten::StridesType> strides,
    executorch::aten::ScalarType type,
    std::function<void(void*)> deleter);
/// Append a copy of a value. @throws std::bad_alloc.
void add_copy(Outputs& outputs, const executorch::runtime::EValue& value);

} // namespace blobstore::internal
