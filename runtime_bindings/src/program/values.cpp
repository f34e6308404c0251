#include "program/values.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "os/file.h"

namespace blobstore::internal {

namespace et = executorch::runtime;
using EtError = et::Error;
using EtTensor = executorch::aten::Tensor;

namespace {

/// @param tensor called for tensors only, because for anything else ExecuTorch logs an error.
template <typename TensorMeta>
ValueInfo value_info(et::Result<et::Tag> tag, const TensorMeta& tensor) {
  ValueInfo out;
  out.kind = tag.ok() ? kind_of(tag.get()) : ValueKind::Other;
  if (out.kind != ValueKind::Tensor) {
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

} // namespace

ValueKind kind_of(et::Tag tag) {
  switch (tag) {
    case et::Tag::None:
      return ValueKind::None;
    case et::Tag::Tensor:
      return ValueKind::Tensor;
    case et::Tag::Int:
      return ValueKind::Int;
    case et::Tag::Double:
      return ValueKind::Double;
    case et::Tag::Bool:
      return ValueKind::Bool;
    case et::Tag::String:
      return ValueKind::String;
    default:
      return ValueKind::Other;
  }
}

const char* name_of(ValueKind kind) {
  constexpr const char* kNames[] = {"None", "a tensor", "an int", "a float", "a bool", "a string", "a list"};
  return kNames[static_cast<int>(kind)];
}

std::string describe(EtError error) {
  return std::string("ExecuTorch's ") + et::to_string(error);
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

Layout layout_of(const EtTensor& tensor) {
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(tensor.scalar_type());
  layout.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  layout.dim_order.assign(tensor.dim_order().begin(), tensor.dim_order().end());
  return layout;
}

Value copy_of(const et::EValue& value) {
  Value out;
  out.kind = kind_of(value.tag);
  if (value.isTensor()) {
    const EtTensor& tensor = value.toTensor();
    out.layout = layout_of(tensor);
    out.nbytes = tensor.nbytes();
    out.data = {
        static_cast<uint8_t*>(std::aligned_alloc(64, align_up(std::max<size_t>(out.nbytes, 1), 64))), &std::free};
    if (out.data == nullptr) {
      throw std::bad_alloc();
    }
    if (out.nbytes != 0) {
      std::memcpy(out.data.get(), tensor.const_data_ptr(), out.nbytes);
    }
  } else if (value.isInt()) {
    out.integer = value.toInt();
  } else if (value.isBool()) {
    out.integer = value.toBool();
  } else if (value.isDouble()) {
    out.real = value.toDouble();
  } else if (value.isString()) {
    const auto text = value.toString();
    out.text.assign(text.data(), text.size());
  }
  return out;
}

} // namespace blobstore::internal
