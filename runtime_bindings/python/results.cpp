#include <algorithm>

#include <nanobind/ndarray.h>

#include "convert.h"
#include "dense.h"
#include "interpreter.h"

namespace blobstore::python {
nb::object to_python(const executorch::extension::TensorPtr& tensor, bool torch) {
  auto* data = static_cast<uint8_t*>(tensor->mutable_data_ptr());
  auto* held = new executorch::extension::TensorPtr(tensor);
  nb::capsule owner(
      held, [](void* pointer) noexcept { delete static_cast<executorch::extension::TensorPtr*>(pointer); });
  const nb::dlpack::dtype type = array_type(tensor->scalar_type());
  if (type.bits == 0) {
    const size_t size = tensor->nbytes();
    nb::object bytes = nb::cast(nb::ndarray<nb::numpy, uint8_t>(data, {size}, owner));
    const nb::object layout = layout_object(layout_of(*tensor));
    return call_python(torch ? helpers().to_torch : helpers().to_numpy, bytes, layout);
  }
  const auto rank = static_cast<size_t>(tensor->dim());
  size_t sizes[executorch::runtime::kTensorDimensionLimit];
  int64_t strides[executorch::runtime::kTensorDimensionLimit];
  int64_t step = 1;
  for (size_t i = rank; i-- > 0;) {
    const uint8_t dim = tensor->dim_order()[i];
    sizes[dim] = static_cast<size_t>(tensor->size(dim));
    strides[dim] = step;
    step *= std::max<int64_t>(tensor->size(dim), 1);
  }
  if (torch) {
    return run_python([&] { return nb::cast(nb::ndarray<nb::pytorch>(data, rank, sizes, owner, strides, type)); });
  }
  return run_python([&] { return nb::cast(nb::ndarray<nb::numpy>(data, rank, sizes, owner, strides, type)); });
}

nb::list to_python(const Outputs& outputs, bool torch) {
  nb::list out;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const executorch::runtime::EValue& value = outputs[i];
    if (value.isTensor()) {
      out.append(to_python(outputs.tensor(i), torch));
    } else if (value.isInt()) {
      out.append(value.toInt());
    } else if (value.isBool()) {
      out.append(value.toBool());
    } else if (value.isDouble()) {
      out.append(value.toDouble());
    } else if (value.isString()) {
      out.append(nb::str(value.toString().data(), value.toString().size()));
    } else {
      out.append(nb::none());
    }
  }
  return out;
}

} // namespace blobstore::python
