// Program and Method in Java.
#include <blobstore/packed.h>
#include <blobstore/program.h>

#include "convert.h"

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

jobjectArray to_java(JNIEnv* env, const std::vector<Info>& infos) {
  return make_array(
             env,
             "ValueInfo",
             infos,
             [env](const Info& one) {
               const auto ints = [](const auto& list) { return std::vector<jint>(list.begin(), list.end()); };
               return make(
                   env,
                   "ValueInfo",
                   one.kind,
                   one.layout.scalar_type,
                   ints(one.layout.sizes),
                   ints(one.layout.dim_order),
                   one.name);
             })
      .give();
}

jobjectArray inputs(JNIEnv* env, const et::MethodMeta& method, const std::vector<std::string>& names) {
  std::vector<Info> infos;
  for (size_t i = 0; i < method.num_inputs(); ++i) {
    infos.push_back(info(method.input_tag(i), [&] { return method.input_tensor_meta(i); }, names[i]));
  }
  return to_java(env, infos);
}

jobjectArray outputs(JNIEnv* env, const et::MethodMeta& method) {
  std::vector<Info> infos;
  for (size_t i = 0; i < method.num_outputs(); ++i) {
    infos.push_back(info(method.output_tag(i), [&] { return method.output_tensor_meta(i); }, ""));
  }
  return to_java(env, infos);
}

jlong load_program(JNIEnv* env, jclass, jstring path, jlong cache, jlong packed) {
  return guarded(env, [&] {
    return share(Program::load(to_path(env, path), shared<BlobCache>(cache), shared<PackedStore>(packed)));
  });
}

jobjectArray methods(JNIEnv* env, jclass, jlong program) {
  return guarded(env, [&] { return java::to_java(env, object<Program>(program).methods()).give(); });
}

jobjectArray needs(JNIEnv* env, jclass, jlong program, jstring method) {
  return guarded(
      env, [&] { return java::to_java(env, object<Program>(program).needs(to_string(env, method))).give(); });
}

jobjectArray backends(JNIEnv* env, jclass, jlong program, jstring method) {
  return guarded(
      env, [&] { return java::to_java(env, object<Program>(program).backends(to_string(env, method))).give(); });
}

jobjectArray program_inputs(JNIEnv* env, jclass, jlong handle, jstring method) {
  return guarded(env, [&] {
    const auto& program = object<Program>(handle);
    const std::string name = to_string(env, method);
    return inputs(env, program.method_meta(name), program.input_names(name));
  });
}

jobjectArray program_outputs(JNIEnv* env, jclass, jlong program, jstring method) {
  return guarded(env, [&] { return outputs(env, object<Program>(program).method_meta(to_string(env, method))); });
}

jstring packed_cache_path(JNIEnv* env, jclass, jlong program) {
  return guarded(env, [&] { return java::to_java(env, object<Program>(program).packed_cache_path()).give(); });
}

jlong load_method(JNIEnv* env, jclass, jlong program, jstring name) {
  return guarded(env, [&] { return share(object<Program>(program).load_method(to_string(env, name))); });
}

jstring method_name(JNIEnv* env, jclass, jlong method) {
  return guarded(env, [&] { return java::to_java(env, object<Method>(method).name()).give(); });
}

jobjectArray method_inputs(JNIEnv* env, jclass, jlong handle) {
  return guarded(env, [&] {
    const auto& method = object<Method>(handle);
    return inputs(env, method.meta(), method.input_names());
  });
}

jobjectArray method_outputs(JNIEnv* env, jclass, jlong method) {
  return guarded(env, [&] { return outputs(env, object<Method>(method).meta()); });
}

jobjectArray execute(JNIEnv* env, jclass, jlong handle, jobjectArray values, jobjectArray into) {
  return guarded(env, [&] {
    auto& method = object<Method>(handle);
    const Inputs inputs(env, values, method.meta());
    return copy_to_java(env, method.execute(inputs.list()), into).give();
  });
}

} // namespace

void add_programs(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function("loadProgram", "(Ljava/lang/String;JJ)J", &load_program),
       function("programMethods", "(J)[Ljava/lang/String;", &methods),
       function("programNeeds", "(JLjava/lang/String;)[Ljava/lang/String;", &needs),
       function("programBackends", "(JLjava/lang/String;)[Ljava/lang/String;", &backends),
       function("programInputs", "(JLjava/lang/String;)[Ldev/blobstore/ValueInfo;", &program_inputs),
       function("programOutputs", "(JLjava/lang/String;)[Ldev/blobstore/ValueInfo;", &program_outputs),
       function("programPackedCachePath", "(J)Ljava/lang/String;", &packed_cache_path),
       function("loadMethod", "(JLjava/lang/String;)J", &load_method),
       function("methodName", "(J)Ljava/lang/String;", &method_name),
       function("methodInputs", "(J)[Ldev/blobstore/ValueInfo;", &method_inputs),
       function("methodOutputs", "(J)[Ldev/blobstore/ValueInfo;", &method_outputs),
       function("execute", "(J[Ljava/lang/Object;[Ldev/blobstore/Tensor;)[Ljava/lang/Object;", &execute)});
}

} // namespace blobstore::java
