#include "dense.h"

#include <algorithm>
#include <string_view>

#include "interpreter.h"

namespace blobstore::python {

namespace nb = nanobind;
using executorch::aten::ScalarType;

namespace {

/// What a class of Python lends to those who read its tensors in C, as DLPack 1.2 has it.
struct DlpackExchange {
  uint32_t major, minor;
  void* older;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*to_tensor)(void* object, nb::dlpack::dltensor* out); // owned by the object; 0, or an exception of Python
  void* stream;
};
constexpr uint32_t kDlpackMajor = 1; // later ones may change the struct

/// torch's classes, and how its tensors are read; filled when torch is first found.
struct Torch {
  nb::object module; // keeps the classes alive
  PyTypeObject* tensor = nullptr;
  PyTypeObject* parameter = nullptr;
  const DlpackExchange* exchange = nullptr; // null if this torch has none
};

/// A module that was imported already; invalid if it was not.
nb::object imported(const char* name) {
  PyObject* text = PyUnicode_InternFromString(name);
  nb::object module = nb::steal(PyImport_GetModule(text));
  Py_DECREF(text);
  PyErr_Clear();
  return module;
}

const DlpackExchange* exchange_of(nb::handle type) {
  const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    return nullptr;
  }
  const auto* exchange = static_cast<const DlpackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return exchange->major == kDlpackMajor && exchange->to_tensor != nullptr ? exchange : nullptr;
}

const Torch* known_torch() {
  static const Torch* known = nullptr;
  if (known == nullptr) {
    const nb::object module = imported("torch");
    if (!module.is_valid() || !nb::hasattr(module, "Tensor") || !nb::hasattr(module, "nn") ||
        !nb::hasattr(module.attr("nn"), "Parameter")) { // another thread may be importing it
      return nullptr;
    }
    auto* made = new Torch;
    made->module = module;
    made->tensor = reinterpret_cast<PyTypeObject*>(module.attr("Tensor").ptr());
    made->parameter = reinterpret_cast<PyTypeObject*>(module.attr("nn").attr("Parameter").ptr());
    made->exchange = exchange_of(module.attr("Tensor"));
    known = made;
  }
  return known;
}

/// DLPack's codes of types.
enum : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kFloat8E4m3fn = 10, kFloat8E5m2 = 12 };

/// Scalar types by DLPack's codes and bits, those first of which nanobind makes arrays.
constexpr struct {
  uint8_t code, bits;
  ScalarType scalar_type;
} kTypes[] = {
    {kUInt, 8, ScalarType::Byte},
    {kInt, 8, ScalarType::Char},
    {kInt, 16, ScalarType::Short},
    {kInt, 32, ScalarType::Int},
    {kInt, 64, ScalarType::Long},
    {kFloat, 16, ScalarType::Half},
    {kFloat, 32, ScalarType::Float},
    {kFloat, 64, ScalarType::Double},
    {kBool, 8, ScalarType::Bool},
    {kBfloat, 16, ScalarType::BFloat16},
    {kFloat8E5m2, 8, ScalarType::Float8_e5m2},
    {kFloat8E4m3fn, 8, ScalarType::Float8_e4m3fn},
    {kUInt, 16, ScalarType::UInt16},
    {kUInt, 32, ScalarType::UInt32},
    {kUInt, 64, ScalarType::UInt64},
};
constexpr size_t kArrayTypes = 9;

/// The scalar type of DLPack's code and bits, or -1.
int8_t type_of(nb::dlpack::dtype type) {
  for (const auto& [code, bits, scalar_type] : kTypes) {
    if (type.code == code && type.bits == bits && type.lanes == 1) {
      return static_cast<int8_t>(scalar_type);
    }
  }
  return -1;
}

/// The scalar type of a buffer's format, or -1.
int8_t type_of_format(const char* format, Py_ssize_t item_size) {
  if (format == nullptr) {
    return static_cast<int8_t>(ScalarType::Byte);
  }
  if (format[0] == '@' || format[0] == '=' || format[0] == '<') { // little-endian, as this machine is
    ++format;
  }
  if (format[0] == '\0' || format[1] != '\0') {
    return -1;
  }
  constexpr struct {
    std::string_view formats;
    uint8_t code;
  } kKinds[] = {{"?", kBool}, {"efd", kFloat}, {"bhilq", kInt}, {"BHILQ", kUInt}};
  for (const auto& [formats, code] : kKinds) {
    if (formats.find(format[0]) != std::string_view::npos) {
      return type_of({code, static_cast<uint8_t>(8 * item_size), 1});
    }
  }
  return -1;
}

/// Whether a tensor is one whose sign torch would change when it is read.
bool is_negated(nb::handle tensor) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* const answer = run_python([&] { return PyObject_CallMethodNoArgs(tensor.ptr(), is_neg); });
  if (answer == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(answer).ptr() == Py_True;
}

} // namespace

bool is_torch(nb::handle object) {
  const Torch* torch = known_torch();
  return torch != nullptr && PyObject_TypeCheck(object.ptr(), torch->tensor);
}

std::optional<Dense> dense_tensor(nb::handle object) {
  const Torch* torch = known_torch();
  if (torch == nullptr || torch->exchange == nullptr ||
      (Py_TYPE(object.ptr()) != torch->tensor && Py_TYPE(object.ptr()) != torch->parameter)) {
    return std::nullopt;
  }
  nb::dlpack::dltensor tensor = {};
  if (run_python([&] { return torch->exchange->to_tensor(object.ptr(), &tensor); }) != 0) { // sparse, quantized, ...
    PyErr_Clear();
    return std::nullopt;
  }
  Dense dense;
  dense.scalar_type = type_of(tensor.dtype);
  if (dense.scalar_type < 0 || tensor.device.device_type != nb::device::cpu::value || tensor.ndim < 0 ||
      static_cast<size_t>(tensor.ndim) > dense.sizes.size()) {
    return std::nullopt;
  }
  dense.rank = static_cast<uint8_t>(tensor.ndim);
  uint64_t count = 1;
  for (uint8_t i = dense.rank; i-- > 0;) {
    dense.sizes[i] = tensor.shape[i];
    if (dense.sizes[i] > 1 && count != 0 && static_cast<uint64_t>(tensor.strides[i]) != count) {
      return std::nullopt;
    }
    count *= static_cast<uint64_t>(dense.sizes[i]); // of an empty tensor it may be too large on the way
  }
  dense.data = static_cast<uint8_t*>(tensor.data) + tensor.byte_offset;
  dense.nbytes = static_cast<size_t>(count * (tensor.dtype.bits / 8));
  if ((tensor.data == nullptr && count != 0) || is_negated(object)) { // zeros without memory
    return std::nullopt;
  }
  return dense;
}

bool is_array(nb::handle object) {
  static PyTypeObject* array = nullptr;
  if (array == nullptr) {
    const nb::object module = imported("numpy");
    if (!module.is_valid() || !nb::hasattr(module, "ndarray")) {
      return false;
    }
    array = reinterpret_cast<PyTypeObject*>(nb::object(module.attr("ndarray")).release().ptr());
  }
  return PyObject_TypeCheck(object.ptr(), array);
}

nb::dlpack::dtype array_type(ScalarType scalar_type) {
  for (size_t i = 0; i < kArrayTypes; ++i) {
    if (kTypes[i].scalar_type == scalar_type) {
      return {kTypes[i].code, kTypes[i].bits, 1};
    }
  }
  return {0, 0, 1};
}

std::optional<Dense> dense_buffer(const Py_buffer& buffer) {
  Dense dense;
  dense.scalar_type = type_of_format(buffer.format, buffer.itemsize);
  if (dense.scalar_type < 0 || static_cast<size_t>(buffer.ndim) > dense.sizes.size()) {
    return std::nullopt;
  }
  dense.rank = static_cast<uint8_t>(buffer.ndim);
  std::copy_n(buffer.shape, buffer.ndim, dense.sizes.begin());
  dense.data = buffer.buf;
  dense.nbytes = static_cast<size_t>(buffer.len);
  dense.writable = buffer.readonly == 0;
  return dense;
}

} // namespace blobstore::python
