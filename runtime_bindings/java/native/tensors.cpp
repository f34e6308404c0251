// LogicalTensors in Java.
#include <blobstore/tensors.h>

#include "convert.h"

namespace blobstore::java {
namespace {

jlong open(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&] { return share(std::make_shared<LogicalTensors>(shared<BlobCache>(cache))); });
}

jobjectArray names(JNIEnv* env, jclass, jlong tensors) {
  return guarded(env, [&] { return to_java(env, object<LogicalTensors>(tensors).names()).give(); });
}

jboolean contains(JNIEnv* env, jclass, jlong tensors, jstring name) {
  return guarded(env, [&]() -> jboolean { return object<LogicalTensors>(tensors).contains(to_string(env, name)); });
}

jobject at(JNIEnv* env, jclass, jlong tensors, jstring name) {
  return guarded(env, [&] {
    const LogicalTensor found = object<LogicalTensors>(tensors).at(to_string(env, name));
    if (item_size(found.scalar_type) == 0) { // records are not checked for that
      throw Error(ErrorKind::UnsupportedData, "'" + found.name + "' has elements of an unknown type");
    }
    return make(
               env,
               "LogicalTensor",
               found.name,
               found.scalar_type,
               std::vector<jlong>(found.sizes.begin(), found.sizes.end()),
               found.aliases,
               found.keys,
               found.needs,
               found.refusal,
               found.auxiliary)
        .give();
  });
}

jobject value(JNIEnv* env, jclass, jlong tensors, jstring name) {
  return guarded(env, [&] {
    const executorch::extension::TensorPtr found = object<LogicalTensors>(tensors).value(to_string(env, name));
    return copy_to_java(env, *found).give();
  });
}

jlong update(JNIEnv* env, jclass, jlong tensors, jobjectArray names, jobjectArray values, jboolean finite) {
  return guarded(env, [&] {
    const NamedTensors given(env, names, values);
    return static_cast<jlong>(object<LogicalTensors>(tensors).update(given.state_dict(), finite != JNI_FALSE));
  });
}

jlong update_state_dict(
    JNIEnv* env, jclass, jlong tensors, jobjectArray names, jobjectArray values, jboolean strict, jboolean finite) {
  return guarded(env, [&] {
    const NamedTensors given(env, names, values);
    return static_cast<jlong>(object<LogicalTensors>(tensors).update_state_dict(
        given.state_dict(), strict != JNI_FALSE, finite != JNI_FALSE));
  });
}

jlong update_file(JNIEnv* env, jclass, jlong tensors, jstring path, jboolean strict, jboolean finite) {
  return guarded(env, [&] {
    return static_cast<jlong>(object<LogicalTensors>(tensors).update_state_dict(
        load_state_dict(to_path(env, path)), strict != JNI_FALSE, finite != JNI_FALSE));
  });
}

} // namespace

void add_tensors(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function("openTensors", "(J)J", &open),
       function("tensorNames", "(J)[Ljava/lang/String;", &names),
       function("tensorContains", "(JLjava/lang/String;)Z", &contains),
       function("tensorAt", "(JLjava/lang/String;)Ldev/blobstore/LogicalTensor;", &at),
       function("tensorValue", "(JLjava/lang/String;)Ldev/blobstore/Tensor;", &value),
       function("tensorUpdate", "(J[Ljava/lang/String;[Ldev/blobstore/Tensor;Z)J", &update),
       function("tensorUpdateStateDict", "(J[Ljava/lang/String;[Ldev/blobstore/Tensor;ZZ)J", &update_state_dict),
       function("tensorUpdateFile", "(JLjava/lang/String;ZZ)J", &update_file)});
}

} // namespace blobstore::java
