#include <cstring>
#include <unordered_map>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
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
  nb::object value = run_python([&] { return nb::steal(PyObject_GetAttr(object.ptr(), name)); });
  if (!value.is_valid()) {
    throw nb::python_error();
  }
  return value;
}

nb::object call(nb::handle object, PyObject* name) {
  nb::object value = run_python([&] { return nb::steal(PyObject_CallMethodNoArgs(object.ptr(), name)); });
  if (!value.is_valid()) {
    throw nb::python_error();
  }
  return value;
}

bool is_row_major(const Layout& layout) {
  for (size_t i = 0; i < layout.dim_order.size(); ++i) {
    if (layout.dim_order[i] != i) {
      return false;
    }
  }
  return true;
}

/// The scalar type of a buffer's format, -1 if there is none.
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

bool set_sizes(Argument& out, nb::handle sizes) {
  const Py_ssize_t rank = PyTuple_GET_SIZE(sizes.ptr());
  if (rank > 16) {
    return false;
  }
  out.rank = static_cast<uint8_t>(rank);
  for (Py_ssize_t i = 0; i < rank; ++i) {
    const long long size = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
    if (size < 0 || size > INT32_MAX) {
      PyErr_Clear();
      return false;
    }
    out.sizes[i] = static_cast<int32_t>(size);
  }
  return true;
}

void set_nbytes(Argument& out) {
  out.nbytes = item_size(out.scalar_type);
  for (int i = 0; i < out.rank; ++i) {
    out.nbytes *= static_cast<size_t>(out.sizes[i]);
  }
}

} // namespace

Arguments::Arguments(const nb::args& values, const std::vector<ValueInfo>& inputs) : list_(values.size()) {
  buffers_.reserve(values.size());
  try {
    for (size_t i = 0; i < list_.size(); ++i) {
      const ValueInfo* info = i < inputs.size() ? &inputs[i] : nullptr;
      const Layout* expected = info != nullptr && info->kind == ValueKind::Tensor ? &info->layout : nullptr;
      const nb::handle value = values[i];
      Argument& out = list_[i];
      Torch* known = known_torch();
      if (known != nullptr && PyObject_TypeCheck(value.ptr(), known->tensor)) {
        torch_ = true;
        if (take_torch(value, expected, out)) {
          continue;
        }
      } else if (PyObject_CheckBuffer(value.ptr()) && take_buffer(value, expected, out)) {
        continue;
      }
      take_other(value, info, out);
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

bool Arguments::take_torch(nb::handle value, const Layout* expected, Argument& out) {
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
  out.kind = ValueKind::Tensor;
  out.scalar_type = type->second;
  if (!set_sizes(out, get(value, shape))) {
    return false;
  }
  set_nbytes(out);
  out.writable = true;
  out.data = PyLong_AsVoidPtr(call(value, data_ptr).ptr());
  return true;
}

bool Arguments::take_buffer(nb::handle value, const Layout* expected, Argument& out) {
  Py_buffer buffer;
  if ((expected != nullptr && !is_row_major(*expected)) ||
      PyObject_GetBuffer(value.ptr(), &buffer, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  buffers_.push_back(buffer);
  const int8_t type = type_of_format(buffer.format, buffer.itemsize);
  if (type < 0 || buffer.ndim > 16) {
    return false;
  }
  out.kind = ValueKind::Tensor;
  out.scalar_type = type;
  out.rank = static_cast<uint8_t>(buffer.ndim);
  for (int i = 0; i < buffer.ndim; ++i) {
    if (buffer.shape[i] > INT32_MAX) {
      return false;
    }
    out.sizes[i] = static_cast<int32_t>(buffer.shape[i]);
  }
  out.nbytes = static_cast<size_t>(buffer.len);
  out.writable = buffer.readonly == 0;
  out.data = buffer.buf;
  return true;
}

/// Numbers, and everything that the Python side can turn into bytes: other orders of dimensions, other types.
void Arguments::take_other(nb::handle value, const ValueInfo* info, Argument& out) {
  out = Argument{};
  if (value.is_none()) {
    return;
  }
  if (PyBool_Check(value.ptr())) {
    out.kind = ValueKind::Bool;
    out.integer = value.ptr() == Py_True;
    return;
  }
  if (PyLong_Check(value.ptr())) {
    int overflow = 0;
    out.integer = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow != 0) {
      throw Error(ErrorKind::Input, "an int does not fit in 64 bits");
    }
    out.real = static_cast<double>(out.integer);
    out.kind = info != nullptr && info->kind == ValueKind::Double ? ValueKind::Double : ValueKind::Int;
    return;
  }
  if (PyFloat_Check(value.ptr())) {
    out.kind = ValueKind::Double;
    out.real = PyFloat_AsDouble(value.ptr());
    return;
  }
  const bool tensor = info != nullptr && info->kind == ValueKind::Tensor;
  nb::object wanted = tensor ? layout_object(info->layout) : nb::none();
  if (tensor && nb::hasattr(value, "shape")) { // checked before a huge tensor that does not fit is copied
    const nb::object shape = value.attr("shape");
    const auto& sizes = info->layout.sizes;
    bool fits = nb::len_hint(shape) == sizes.size();
    for (size_t i = 0; fits && i < sizes.size(); ++i) {
      fits = shape[i].attr("__le__")(sizes[i]).is(nb::handle(Py_True));
    }
    if (!fits) {
      throw Error(
          ErrorKind::Input,
          "input " + std::to_string(&out - list_.data()) + " is " + to_string(info->layout) + ", not of shape " +
              nb::str(shape).c_str());
    }
  }
  const nb::tuple pair = nb::cast<nb::tuple>(run_python([&] { return helpers().as_bytes(value, wanted); }));
  const std::optional<Layout> layout = layout_from(pair[1]);
  Py_buffer buffer;
  if (PyObject_GetBuffer(nb::handle(pair[0]).ptr(), &buffer, PyBUF_SIMPLE) != 0) {
    throw nb::python_error();
  }
  buffers_.push_back(buffer);
  kept_.push_back(pair);
  out.kind = ValueKind::Tensor;
  out.scalar_type = layout->scalar_type;
  if (layout->sizes.size() > 16) {
    throw Error(ErrorKind::Input, "a tensor has more than 16 dimensions");
  }
  out.rank = static_cast<uint8_t>(layout->sizes.size());
  std::copy(layout->sizes.begin(), layout->sizes.end(), out.sizes);
  out.nbytes = static_cast<size_t>(buffer.len);
  out.data = buffer.buf;
}

} // namespace blobstore::python
