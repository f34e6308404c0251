#include <algorithm>
#include <unordered_map>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {

namespace et = executorch::runtime;
using et::TensorInfo;

namespace {

/// torch's types by identity, and its tensor class; filled when torch is first found.
struct Torch {
  nb::object module; // keeps the class alive
  PyTypeObject* tensor = nullptr;
  std::unordered_map<PyObject*, int8_t> types;
};

Torch* known_torch() {
  static Torch* known = nullptr;
  if (known == nullptr) {
    PyObject* name = PyUnicode_InternFromString("torch");
    nb::object module = nb::steal(PyImport_GetModule(name));
    Py_DECREF(name);
    if (!module.is_valid() || !nb::hasattr(module, "Tensor")) {
      PyErr_Clear();
      return nullptr;
    }
    constexpr std::pair<const char*, int8_t> kTypes[] = {
        {"uint8", 0},
        {"int8", 1},
        {"int16", 2},
        {"int32", 3},
        {"int64", 4},
        {"float16", 5},
        {"float32", 6},
        {"float64", 7},
        {"bool", 11},
        {"bfloat16", 15},
        {"float8_e5m2", 23},
        {"float8_e4m3fn", 24},
        {"uint16", 27},
        {"uint32", 28},
        {"uint64", 29},
    };
    auto* made = new Torch;
    made->module = module;
    made->tensor = reinterpret_cast<PyTypeObject*>(module.attr("Tensor").ptr());
    for (const auto& [type, number] : kTypes) {
      if (nb::hasattr(module, type)) {
        made->types[module.attr(type).ptr()] = number;
      }
    }
    known = made;
  }
  return known;
}

PyObject* interned(const char* text) {
  return PyUnicode_InternFromString(text);
}

nb::object get(nb::handle object, PyObject* name) {
  PyObject* const value = run_python([&] { return PyObject_GetAttr(object.ptr(), name); });
  if (value == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(value);
}

nb::object call(nb::handle object, PyObject* name) {
  PyObject* const value = run_python([&] { return PyObject_CallMethodNoArgs(object.ptr(), name); });
  if (value == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(value);
}

bool is_row_major(const TensorInfo& info) {
  const auto order = info.dim_order();
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) {
      return false;
    }
  }
  return true;
}

/// The scalar type of a buffer's format, or -1.
int8_t type_of_format(const char* format, Py_ssize_t item_size) {
  if (format == nullptr) {
    return 0;
  }
  if (format[0] == '@' || format[0] == '=' || format[0] == '<') { // little-endian, as this machine is
    ++format;
  }
  if (format[0] == '\0' || format[1] != '\0') {
    return -1;
  }
  switch (format[0]) {
    case '?':
      return 11;
    case 'e':
      return 5;
    case 'f':
      return 6;
    case 'd':
      return 7;
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      return item_size == 1 ? 1 : item_size == 2 ? 2 : item_size == 4 ? 3 : 4;
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
      return item_size == 1 ? 0 : item_size == 2 ? 27 : item_size == 4 ? 28 : 29;
    default:
      return -1;
  }
}

} // namespace

Layout layout_of(const TensorInfo& info) {
  const auto sizes = info.sizes();
  const auto order = info.dim_order();
  return {static_cast<int8_t>(info.scalar_type()), {sizes.begin(), sizes.end()}, {order.begin(), order.end()}};
}

Layout layout_of(const executorch::aten::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const auto order = tensor.dim_order();
  return {static_cast<int8_t>(tensor.scalar_type()), {sizes.begin(), sizes.end()}, {order.begin(), order.end()}};
}

Arguments::Arguments(const nb::args& values, const et::MethodMeta& method)
    : places_(values.size()), list_(values.size()), in_place_(values.size()) {
  buffers_.reserve(values.size());
  try {
    for (size_t i = 0; i < list_.size(); ++i) {
      const bool known_input = i < method.num_inputs();
      const et::Result<et::Tag> tag = known_input ? method.input_tag(i) : et::Result<et::Tag>(et::Tag::None);
      std::optional<TensorInfo> info;
      if (tag.ok() && tag.get() == et::Tag::Tensor) {
        info = method.input_tensor_meta(i).get();
      }
      const TensorInfo* expected = info ? &*info : nullptr;
      const nb::handle value = values[i];
      Torch* known = known_torch();
      if (known != nullptr && PyObject_TypeCheck(value.ptr(), known->tensor)) {
        torch_ = true;
        if (take_torch(i, value, expected)) {
          continue;
        }
      } else if (PyObject_CheckBuffer(value.ptr()) && take_buffer(i, value, expected)) {
        continue;
      }
      take_other(i, value, tag.ok() && tag.get() == et::Tag::Double, expected);
    }
  } catch (...) {
    for (Py_buffer& buffer : buffers_) {
      PyBuffer_Release(&buffer);
    }
    throw;
  }
}

Arguments::~Arguments() {
  for (Py_buffer& buffer : buffers_) {
    PyBuffer_Release(&buffer);
  }
}

bool Arguments::set_sizes(size_t index, nb::handle sizes) {
  Place& place = places_[index];
  const Py_ssize_t rank = PyTuple_GET_SIZE(sizes.ptr());
  if (rank > static_cast<Py_ssize_t>(et::kTensorDimensionLimit)) {
    return false;
  }
  place.rank = static_cast<uint8_t>(rank);
  for (Py_ssize_t i = 0; i < rank; ++i) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
    if (size < 0 || size > INT32_MAX) {
      PyErr_Clear();
      return false;
    }
    place.sizes[i] = static_cast<int32_t>(size);
  }
  return true;
}

/// Make the tensor of the sizes and the type in its place, in the dim order that the method takes.
void Arguments::set_tensor(size_t index, void* data, bool in_place, const TensorInfo* expected) {
  Place& place = places_[index];
  if (!executorch::aten::safe_numel(place.sizes, place.rank).ok()) {
    throw Error(ErrorKind::Input, "input " + std::to_string(index) + " is too large");
  }
  for (uint8_t i = 0; i < place.rank; ++i) {
    place.dim_order[i] =
        expected != nullptr && expected->dim_order().size() == place.rank ? expected->dim_order()[i] : i;
  }
  place.tensor.emplace(
      static_cast<executorch::aten::ScalarType>(place.scalar_type), place.rank, place.sizes, data, place.dim_order);
  list_[index] = et::EValue(executorch::aten::Tensor(&*place.tensor));
  in_place_[index] = in_place;
}

bool Arguments::take_torch(size_t index, nb::handle value, const TensorInfo* expected) {
  static PyObject* const dtype = interned("dtype");
  static PyObject* const shape = interned("shape");
  static PyObject* const is_cpu = interned("is_cpu");
  static PyObject* const is_neg = interned("is_neg");
  static PyObject* const is_contiguous = interned("is_contiguous");
  static PyObject* const data_ptr = interned("data_ptr");
  const auto& types = known_torch()->types;
  const auto type = types.find(get(value, dtype).ptr());
  if (type == types.end() || (expected != nullptr && !is_row_major(*expected)) || get(value, is_cpu).ptr() != Py_True ||
      call(value, is_contiguous).ptr() != Py_True || call(value, is_neg).ptr() == Py_True) {
    return false;
  }
  places_[index].scalar_type = type->second;
  if (!set_sizes(index, get(value, shape))) {
    return false;
  }
  set_tensor(index, PyLong_AsVoidPtr(call(value, data_ptr).ptr()), /*in_place=*/true, expected);
  return true;
}

bool Arguments::take_buffer(size_t index, nb::handle value, const TensorInfo* expected) {
  Py_buffer buffer;
  if ((expected != nullptr && !is_row_major(*expected)) ||
      PyObject_GetBuffer(value.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  buffers_.push_back(buffer);
  const int8_t type = type_of_format(buffer.format, buffer.itemsize);
  if (type < 0 || buffer.ndim > static_cast<int>(et::kTensorDimensionLimit)) {
    return false;
  }
  Place& place = places_[index];
  place.scalar_type = type;
  place.rank = static_cast<uint8_t>(buffer.ndim);
  for (int i = 0; i < buffer.ndim; ++i) {
    if (buffer.shape[i] > INT32_MAX) {
      return false;
    }
    place.sizes[i] = static_cast<int32_t>(buffer.shape[i]);
  }
  set_tensor(index, buffer.buf, buffer.readonly == 0, expected);
  return true;
}

/// Numbers, and everything that the Python side can turn into bytes: other orders of dimensions, other types.
void Arguments::take_other(size_t index, nb::handle value, bool real, const TensorInfo* expected) {
  if (value.is_none()) {
    return;
  }
  if (PyBool_Check(value.ptr())) {
    list_[index] = et::EValue(value.ptr() == Py_True);
    return;
  }
  if (PyLong_Check(value.ptr())) {
    int overflow = 0;
    const int64_t integer = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow != 0) {
      throw Error(ErrorKind::Input, "an int does not fit in 64 bits");
    }
    list_[index] = real ? et::EValue(static_cast<double>(integer)) : et::EValue(integer);
    return;
  }
  if (PyFloat_Check(value.ptr())) {
    list_[index] = et::EValue(PyFloat_AsDouble(value.ptr()));
    return;
  }
  const nb::object wanted = expected != nullptr ? layout_object(layout_of(*expected)) : nb::none();
  if (expected != nullptr) { // checked before a huge tensor that does not fit is copied
    if (const nb::object shape = call_python(helpers().other_shape, value, wanted); !shape.is_none()) {
      throw Error(
          ErrorKind::Input,
          "input " + std::to_string(index) + " is " + blobstore::to_string(layout_of(*expected)) + ", not of shape " +
              nb::str(shape).c_str());
    }
  }
  const nb::tuple pair = nb::cast<nb::tuple>(call_python(helpers().as_bytes, value, wanted));
  const std::optional<Layout> layout = layout_from(pair[1]);
  Py_buffer buffer;
  if (PyObject_GetBuffer(nb::handle(pair[0]).ptr(), &buffer, PyBUF_SIMPLE) != 0) {
    throw nb::python_error();
  }
  buffers_.push_back(buffer);
  kept_.push_back(pair);
  if (layout->sizes.size() > et::kTensorDimensionLimit) {
    throw Error(ErrorKind::Input, "a tensor has more than 16 dimensions");
  }
  Place& place = places_[index];
  place.scalar_type = layout->scalar_type;
  place.rank = static_cast<uint8_t>(layout->sizes.size());
  std::copy(layout->sizes.begin(), layout->sizes.end(), place.sizes);
  set_tensor(index, buffer.buf, /*in_place=*/false, expected);
}

} // namespace blobstore::python
