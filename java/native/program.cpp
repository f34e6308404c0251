// Program and Method in Java.
#include <blobstore/packed.h>
#include <blobstore/program.h>

#include "crossing.h"

namespace blobstore::java {
namespace {

namespace et = executorch::runtime;

/// In the order of ValueInfo.Kind.
jint kind_of(const et::Result<et::Tag>& tag) {
  if (!tag.ok()) { // a list
    return 6;
  }
  switch (tag.get()) {
    case et::Tag::None:
      return 0;
    case et::Tag::Tensor:
      return 1;
    case et::Tag::Int:
      return 2;
    case et::Tag::Double:
      return 3;
    case et::Tag::Bool:
      return 4;
    case et::Tag::String:
      return 5;
    default:
      return 6;
  }
}

struct Info {
  jint kind;
  Layout layout; // of a tensor
  std::string name;
};

template <typename Meta>
Info info(const et::Result<et::Tag>& tag, const Meta& meta, std::string name) {
  Info out{kind_of(tag), {}, std::move(name)};
  if (tag.ok() && tag.get() == et::Tag::Tensor) {
    const et::Result<et::TensorInfo> tensor = meta();
    if (!tensor.ok()) {
      throw Error(ErrorKind::InvalidFile, "a tensor of a method cannot be read");
    }
    out.layout.scalar_type = static_cast<int8_t>(tensor->scalar_type());
    out.layout.sizes.assign(tensor->sizes().begin(), tensor->sizes().end());
    out.layout.dim_order.assign(tensor->dim_order().begin(), tensor->dim_order().end());
  }
  return out;
}

std::vector<Info> inputs(const et::MethodMeta& method, const std::vector<std::string>& names) {
  std::vector<Info> infos;
  for (size_t i = 0; i < method.num_inputs(); ++i) {
    infos.push_back(info(method.input_tag(i), [&] { return method.input_tensor_meta(i); }, names[i]));
  }
  return infos;
}

std::vector<Info> outputs(const et::MethodMeta& method) {
  std::vector<Info> infos;
  for (size_t i = 0; i < method.num_outputs(); ++i) {
    infos.push_back(info(method.output_tag(i), [&] { return method.output_tensor_meta(i); }, ""));
  }
  return infos;
}

std::shared_ptr<Program> load(
    const Path& path, std::shared_ptr<BlobCache> cache, const std::shared_ptr<PackedStore>& packed) {
  return Program::load(path.text, std::move(cache), packed);
}

std::vector<Info> program_inputs(const Program& program, const std::string& method) {
  return inputs(program.method_meta(method), program.input_names(method));
}

std::vector<Info> program_outputs(const Program& program, const std::string& method) {
  return outputs(program.method_meta(method));
}

std::vector<Info> method_inputs(const Method& method) {
  return inputs(method.meta(), method.input_names());
}

std::vector<Info> method_outputs(const Method& method) {
  return outputs(method.meta());
}

Local<jobjectArray> execute(JNIEnv* env, Method& method, jobjectArray values, Results into) {
  const Inputs inputs(env, values, method.meta());
  return copy_to_java(env, method.execute(inputs.list()), into.array);
}

} // namespace

template <>
struct Mirror<Info> {
  static constexpr const char* name = "ValueInfo";
  static auto fields(const Info& info) {
    return std::make_tuple(info.kind, info.layout.scalar_type, info.layout.sizes, info.layout.dim_order, info.name);
  }
};

std::vector<Row> program_rows() {
  return {
      row<&load>("loadProgram"),
      row<&Program::methods>("programMethods"),
      row<&Program::needs>("programNeeds"),
      row<&Program::backends>("programBackends"),
      row<&program_inputs>("programInputs"),
      row<&program_outputs>("programOutputs"),
      row<&Program::packed_cache_path>("programPackedCachePath"),
      row<&Program::load_method>("loadMethod"),
      row<&Method::name>("methodName"),
      row<&method_inputs>("methodInputs"),
      row<&method_outputs>("methodOutputs"),
      row<&execute>("execute")};
}

} // namespace blobstore::java
