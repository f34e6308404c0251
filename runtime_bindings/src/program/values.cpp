#include "program/values.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "os/file.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {

executorch::extension::TensorPtr Outputs::tensor(size_t index) const {
  if (index >= values_.size() || !values_[index].isTensor()) {
    return nullptr;
  }
  return std::static_pointer_cast<executorch::aten::Tensor>(memory_[index]);
}

void Outputs::add(executorch::runtime::EValue value, std::shared_ptr<void> memory) {
  memory_.push_back(std::move(memory));
  values_.push_back(std::move(value));
}

} // namespace blobstore

namespace blobstore::internal {

namespace et = executorch::runtime;
using EtError = et::Error;
using EtTensor = executorch::aten::Tensor;

namespace {

/// @param tensor called for tensors only, because for anything else ExecuTorch logs an error.
template <typename TensorMeta>
ValueInfo value_info(et::Result<et::Tag> tag, const TensorMeta& tensor) {
  ValueInfo out;
  if (tag.ok()) {
    out.tag = tag.get();
  }
  if (!out.is_tensor()) {
    return out;
  }
  if (const et::Result<et::TensorInfo> info = tensor(); info.ok()) {
    out.layout.scalar_type = static_cast<int8_t>(info->scalar_type());
    out.layout.sizes.assign(info->sizes().begin(), info->sizes().end());
    out.layout.dim_order.assign(info->dim_order().begin(), info->dim_order().end());
    out.name = info->name();
  }
  return out;
}

/// The dimensions of more than one element, from outermost to innermost in memory.
std::vector<uint8_t> order_of(const EtTensor& tensor) {
  std::vector<uint8_t> order;
  const auto known = tensor.dim_order();
  for (size_t i = 0; i < known.size(); ++i) {
    const uint8_t dim = known.data() == nullptr ? static_cast<uint8_t>(i) : known[i]; // null means row-major
    if (tensor.size(dim) > 1) {
      order.push_back(dim);
    }
  }
  return order;
}

using executorch::extension::make_tensor_ptr;
constexpr auto kStatic = executorch::aten::TensorShapeDynamism::STATIC;

// Vendors still have an ExecuTorch whose tensors have no device.
template <typename Device, typename Deleter, typename... Others>
auto make_fixed(int, Deleter& deleter, Others&... others)
    -> decltype(make_tensor_ptr(others..., Device(executorch::aten::DeviceType::CPU), kStatic, deleter)) {
  return make_tensor_ptr(std::move(others)..., Device(executorch::aten::DeviceType::CPU), kStatic, std::move(deleter));
}
template <typename Device, typename Deleter, typename... Others>
auto make_fixed(long, Deleter& deleter, Others&... others) {
  return make_tensor_ptr(std::move(others)..., kStatic, std::move(deleter));
}

executorch::extension::TensorPtr copy_of(const EtTensor& tensor) {
  const size_t size = tensor.nbytes();
  const std::shared_ptr<void> data(
      std::aligned_alloc(64, align_up(std::max<size_t>(size, 1), 64)), [](void* memory) { std::free(memory); });
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  if (size != 0) {
    std::memcpy(data.get(), tensor.const_data_ptr(), size);
  }
  return fixed_tensor(
      {tensor.sizes().begin(), tensor.sizes().end()},
      data.get(),
      {tensor.dim_order().begin(), tensor.dim_order().end()},
      {tensor.strides().begin(), tensor.strides().end()},
      tensor.scalar_type(),
      [data](void*) {});
}

/// A string, and what an EValue refers to.
struct Text {
  std::string text;
  executorch::aten::ArrayRef<char> chars;
};

} // namespace

const char* name_of(std::optional<et::Tag> tag) {
  if (!tag) {
    return "a list";
  }
  switch (*tag) {
    case et::Tag::None:
      return "None";
    case et::Tag::Tensor:
      return "a tensor";
    case et::Tag::Int:
      return "an int";
    case et::Tag::Double:
      return "a float";
    case et::Tag::Bool:
      return "a bool";
    case et::Tag::String:
      return "a string";
    default:
      return "a list";
  }
}

std::string describe(EtError error) {
  return format("ExecuTorch's {}", et::to_string(error));
}

std::vector<ValueInfo> input_infos(const et::MethodMeta& method) {
  std::vector<ValueInfo> infos;
  for (size_t i = 0; i < method.num_inputs(); ++i) {
    infos.push_back(value_info(method.input_tag(i), [&] { return method.input_tensor_meta(i); }));
  }
  return infos;
}

std::vector<ValueInfo> output_infos(const et::MethodMeta& method) {
  std::vector<ValueInfo> infos;
  for (size_t i = 0; i < method.num_outputs(); ++i) {
    infos.push_back(value_info(method.output_tag(i), [&] { return method.output_tensor_meta(i); }));
  }
  return infos;
}

bool same_order(const EtTensor& one, const EtTensor& other) {
  const auto a = one.dim_order();
  const auto b = other.dim_order();
  const bool known = a.data() != nullptr && b.data() != nullptr;
  return (known && std::equal(a.begin(), a.end(), b.begin(), b.end())) || order_of(one) == order_of(other);
}

executorch::extension::TensorPtr fixed_tensor(
    std::vector<executorch::aten::SizesType> sizes,
    void* data,
    std::vector<executorch::aten::DimOrderType> dim_order,
    std::vector<executorch::aten::StridesType> strides,
    executorch::aten::ScalarType type,
    std::function<void(void*)> deleter) {
  return make_fixed<executorch::aten::Device>(0, deleter, sizes, data, dim_order, strides, type);
}

void add_copy(Outputs& outputs, const et::EValue& value) {
  if (value.isTensor()) {
    executorch::extension::TensorPtr copy = copy_of(value.toTensor());
    const EtTensor tensor = *copy;
    outputs.add(tensor, std::move(copy));
  } else if (value.isString()) {
    const auto chars = value.toString();
    auto text = std::make_shared<Text>();
    text->text.assign(chars.data(), chars.size());
    text->chars = {text->text.data(), text->text.size()};
    executorch::aten::ArrayRef<char>* const reference = &text->chars;
    outputs.add(et::EValue(reference), std::move(text));
  } else {
    outputs.add(value.isInt() || value.isBool() || value.isDouble() ? value : et::EValue(), nullptr);
  }
}

} // namespace blobstore::internal
