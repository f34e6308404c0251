#include <nanobind/ndarray.h>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

/// The array type of a scalar type. It has 0 bits if the Python side must make the array.
nb::dlpack::dtype array_type(int8_t scalar_type) {
  using nb::dlpack::dtype_code;
  const auto make = [](dtype_code code, uint8_t bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), bits, 1};
  };
  switch (scalar_type) {
    case 0:
      return make(dtype_code::UInt, 8);
    case 1:
      return make(dtype_code::Int, 8);
    case 2:
      return make(dtype_code::Int, 16);
    case 3:
      return make(dtype_code::Int, 32);
    case 4:
      return make(dtype_code::Int, 64);
    case 5:
      return make(dtype_code::Float, 16);
    case 6:
      return make(dtype_code::Float, 32);
    case 7:
      return make(dtype_code::Float, 64);
    case 11:
      return make(dtype_code::Bool, 8);
    default:
      return nb::dlpack::dtype{0, 0, 1};
  }
}

nb::object tensor_to_python(Value&& value, bool torch) {
  const Layout& layout = value.layout;
  const size_t rank = layout.sizes.size();
  uint8_t* data = value.data.release();
  nb::capsule owner(data, [](void* memory) noexcept { std::free(memory); });
  const nb::dlpack::dtype type = array_type(layout.scalar_type);
  if (type.bits == 0) {
    const size_t size = value.nbytes;
    nb::object bytes = nb::cast(nb::ndarray<nb::numpy, uint8_t>(data, {size}, owner));
    return run_python([&] { return (torch ? helpers().to_torch : helpers().to_numpy)(bytes, layout_object(layout)); });
  }
  size_t sizes[64];
  int64_t strides[64];
  int64_t step = 1;
  for (size_t i = rank; i-- > 0;) {
    const uint8_t dim = layout.dim_order[i];
    sizes[dim] = static_cast<size_t>(layout.sizes[dim]);
    strides[dim] = step;
    step *= std::max(layout.sizes[dim], 1);
  }
  if (torch) {
    return run_python([&] { return nb::cast(nb::ndarray<nb::pytorch>(data, rank, sizes, owner, strides, type)); });
  }
  return run_python([&] { return nb::cast(nb::ndarray<nb::numpy>(data, rank, sizes, owner, strides, type)); });
}

} // namespace

nb::list to_python(std::vector<Value>&& values, bool torch) {
  nb::list out;
  for (Value& value : values) {
    switch (value.kind) {
      case ValueKind::Tensor:
        out.append(tensor_to_python(std::move(value), torch));
        break;
      case ValueKind::Int:
        out.append(value.integer);
        break;
      case ValueKind::Bool:
        out.append(value.integer != 0);
        break;
      case ValueKind::Double:
        out.append(value.real);
        break;
      case ValueKind::String:
        out.append(nb::str(value.text.data(), value.text.size()));
        break;
      default:
        out.append(nb::none());
    }
  }
  return out;
}

} // namespace blobstore::python
