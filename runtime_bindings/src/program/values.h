// ExecuTorch's values in the terms of this library.
#pragma once

#include <string>

#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/executor/program.h>

#include <blobstore/program.h>

namespace blobstore::internal {

ValueKind kind_of(executorch::runtime::Tag tag);
/// For messages.
const char* name_of(ValueKind kind);
std::string describe(executorch::runtime::Error error);

std::vector<ValueInfo> input_infos(const executorch::runtime::MethodMeta& method);
std::vector<ValueInfo> output_infos(const executorch::runtime::MethodMeta& method);

Layout layout_of(const executorch::aten::Tensor& tensor);
/// A copy of a value, in memory of its own. @throws std::bad_alloc.
Value copy_of(const executorch::runtime::EValue& value);

} // namespace blobstore::internal
