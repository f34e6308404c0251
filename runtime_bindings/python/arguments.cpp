#include <algorithm>

#include "convert.h"
#include "dense.h"
#include "interpreter.h"

namespace blobstore::python {

namespace et = executorch::runtime;
using et::TensorInfo;

namespace {

bool is_row_major(const TensorInfo& info) {
  const auto order = info.dim_order();
  for (size_t i = 0; i < order.size(); ++i) {
    if (order[i] != i) {
      return false;
    }
  }
  return true;
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
  for (size_t i = 0; i < list_.size(); ++i) {
    const bool known_input = i < method.num_inputs();
    const et::Result<et::Tag> tag = known_input ? method.input_tag(i) : et::Result<et::Tag>(et::Tag::None);
    std::optional<TensorInfo> info;
    if (tag.ok() && tag.get() == et::Tag::Tensor) {
      info = method.input_tensor_meta(i).get();
    }
    const TensorInfo* expected = info ? &*info : nullptr;
    const nb::handle value = values[i];
    const bool as_it_lies = expected == nullptr || is_row_major(*expected);
    if (is_torch(value)) {
      torch_ = true;
      const std::optional<Dense> dense = as_it_lies ? dense_tensor(value) : std::nullopt;
      if (dense && take_dense(i, *dense, expected)) {
        continue;
      }
    } else if (as_it_lies && PyObject_CheckBuffer(value.ptr()) && take_buffer(i, value, expected)) {
      continue;
    }
    take_other(i, value, tag.ok() && tag.get() == et::Tag::Double, expected);
  }
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

bool Arguments::take_dense(size_t index, const Dense& dense, const TensorInfo* expected) {
  Place& place = places_[index];
  place.scalar_type = dense.scalar_type;
  place.rank = dense.rank;
  for (uint8_t i = 0; i < dense.rank; ++i) {
    if (dense.sizes[i] > INT32_MAX) {
      return false;
    }
    place.sizes[i] = static_cast<int32_t>(dense.sizes[i]);
  }
  set_tensor(index, dense.data, dense.writable, expected);
  return true;
}

bool Arguments::take_buffer(size_t index, nb::handle value, const TensorInfo* expected) {
  const Py_buffer* buffer = buffers_.take_shaped(value);
  const std::optional<Dense> dense = buffer != nullptr ? dense_buffer(*buffer) : std::nullopt;
  return dense && take_dense(index, *dense, expected);
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
  const Py_buffer& buffer = buffers_.take(pair[0]);
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
