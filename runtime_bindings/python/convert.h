// Conversion between Python's values and the library's, and the parts of the module.
#pragma once

#include <forward_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <executorch/runtime/core/exec_aten/util/tensor_dimension_limit.h>
#include <nanobind/nanobind.h>

#include <blobstore/error.h>
#include <blobstore/program.h>
#include <blobstore/tensors.h>

namespace blobstore::internal {
class CacheTensors;
}

namespace blobstore::python {

namespace nb = nanobind;

struct Dense; // in dense.h

/// Functions that the Python side lends for rare cases; see blobstore.runtime. Never freed, because the interpreter may
/// end first.
struct Helpers {
  nb::object as_bytes; // (object, layout) -> (buffer, layout), both in the order of the layout
  nb::object to_numpy; // (buffer, layout) -> array
  nb::object to_torch; // (buffer, layout) -> tensor
  nb::object make_error; // (kind, path, reason, number) -> exception
  nb::object other_shape; // (object, layout) -> its shape as text if that does not fit the layout, or None
  nb::object list_map; // (data map) -> (name, keys)
  nb::object read_map; // (data map, key) -> (buffer, layout or None)
};
Helpers& helpers();

/// A path or a message, which need not be UTF-8: bytes in Python.
struct RawText : std::string {
  RawText() = default;
  RawText(std::string text) : std::string(std::move(text)) {}
};

/// The elements of a vector. Those of a type that nanobind knows.
template <typename Element>
nb::tuple to_tuple(const std::vector<Element>& elements) {
  nb::list out;
  for (const Element& element : elements) {
    out.append(element);
  }
  return nb::tuple(out);
}
/// The generation, and a tuple of the members of each Quantized.
nb::tuple to_tuple(const Updated& updated);

/// A read-only array of bytes that holds their owner.
nb::object to_array(const uint8_t* data, size_t size, std::shared_ptr<const void> owner);

/// Buffers of Python objects, held until this is destroyed. The interpreter must be held then.
class Buffers {
 public:
  Buffers() = default;
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  /// The contiguous bytes of an object. Valid as long as this.
  const Py_buffer& take(nb::handle object);
  /// The same with their format and shape; nullptr if the object cannot give that.
  const Py_buffer* take_shaped(nb::handle object);

 private:
  const Py_buffer* get(nb::handle object, int flags);

  std::forward_list<Py_buffer> held_;
};

/// (scalar type, sizes, dim order), or None.
nb::object layout_object(const std::optional<Layout>& layout);
std::optional<Layout> layout_from(nb::handle object);

/// The layout of a tensor of a method.
Layout layout_of(const executorch::runtime::TensorInfo& info);
Layout layout_of(const executorch::aten::Tensor& tensor);

/// A tensor or an array over the memory of a tensor, which it holds.
nb::object to_python(const executorch::extension::TensorPtr& tensor, bool torch);

/// The arguments of a call, and the objects that keep their memory alive.
class Arguments {
 public:
  /// Use the memory of tensors and arrays where it is, unless their order of dimensions differs from the method's.
  Arguments(const nb::args& values, const executorch::runtime::MethodMeta& method);
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  const std::vector<executorch::runtime::EValue>& list() const { return list_; }
  /// Memory that may be written to may be read in place.
  const std::vector<bool>& in_place() const { return in_place_; }
  /// Whether an argument was a torch tensor; then the results must be tensors too.
  bool torch() const { return torch_; }

 private:
  /// What a tensor refers to. It has no strides, because its dim order says the same.
  struct Place {
    int8_t scalar_type = 0;
    uint8_t rank = 0;
    int32_t sizes[executorch::runtime::kTensorDimensionLimit] = {};
    uint8_t dim_order[executorch::runtime::kTensorDimensionLimit] = {};
    std::optional<executorch::aten::TensorImpl> tensor;
  };

  bool take_dense(size_t index, const Dense& dense, const executorch::runtime::TensorInfo* expected);
  bool take_buffer(size_t index, nb::handle value, const executorch::runtime::TensorInfo* expected);
  /// @param real whether an int stands for a float.
  void take_other(size_t index, nb::handle value, bool real, const executorch::runtime::TensorInfo* expected);
  void set_tensor(size_t index, void* data, bool in_place, const executorch::runtime::TensorInfo* expected);

  std::vector<Place> places_;
  std::vector<executorch::runtime::EValue> list_;
  std::vector<bool> in_place_;
  Buffers buffers_;
  std::vector<nb::object> kept_;
  bool torch_ = false;
};

/// A Python value for each output. Tensors and arrays own their memory.
nb::list to_python(const Outputs& outputs, bool torch);

/// The exception translator: throws what the Python side made of an Error.
void translate(const std::exception_ptr& pointer, void*);

/// What the Python side made of an Error.
nb::object to_exception(const Error& error);

/// The tensors on a cache behind an object of the module's class `Tensors`. Valid as long as the object.
const internal::CacheTensors& tensors_on_cache(nb::handle tensors);

// The parts of the module.
void add_adapters(nb::module_& module);
void add_cache(nb::module_& module);
void add_delegates(nb::module_& module);
void add_files(nb::module_& module);
void add_llm_kernels();
void add_logs(nb::module_& module);
void add_packed(nb::module_& module);
void add_programs(nb::module_& module);
void add_releases(nb::module_& module);
void add_requests(nb::module_& module);
void add_training(nb::module_& module);
void add_tensors(nb::module_& module);

} // namespace blobstore::python

template <>
struct nanobind::detail::type_caster<blobstore::python::RawText> {
  NB_TYPE_CASTER(blobstore::python::RawText, const_name("bytes"))

  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    if (!PyBytes_Check(source.ptr())) {
      return false;
    }
    value.assign(PyBytes_AS_STRING(source.ptr()), static_cast<size_t>(PyBytes_GET_SIZE(source.ptr())));
    return true;
  }
  static handle from_cpp(const blobstore::python::RawText& text, rv_policy, cleanup_list*) noexcept {
    return PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  }
};
