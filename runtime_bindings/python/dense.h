// Tensors and arrays of Python whose elements lie in memory one after the other, the last dimension innermost.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/tensor_dimension_limit.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace blobstore::python {

/// Where the elements of a tensor or an array lie. The Python object owns the memory.
struct Dense {
  int8_t scalar_type = 0;
  uint8_t rank = 0;
  std::array<int64_t, executorch::runtime::kTensorDimensionLimit> sizes = {};
  void* data = nullptr;
  size_t nbytes = 0;
  bool writable = true;
};

/// Whether an object is a tensor of torch, of a subclass too.
bool is_torch(nanobind::handle object);

/// @returns empty if the object is no tensor on the CPU that lies in memory like this, or one of a subclass.
std::optional<Dense> dense_tensor(nanobind::handle object);

/// Whether an object is an array of numpy, of a subclass too.
bool is_array(nanobind::handle object);

/// The type of an array or a tensor that has a scalar type; of 0 bits if the Python side must make it.
nanobind::dlpack::dtype array_type(executorch::aten::ScalarType scalar_type);

/// @param buffer of an object, contiguous and with its format. @returns empty if no tensor has its type or its rank.
std::optional<Dense> dense_buffer(const Py_buffer& buffer);

} // namespace blobstore::python
