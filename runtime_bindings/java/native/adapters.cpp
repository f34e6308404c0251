// LoRA adapters in Java.
#include <blobstore/adapters.h>

#include "convert.h"

namespace blobstore::java {
namespace {

std::optional<double> given(jboolean has, jdouble value) {
  return has != JNI_FALSE ? std::optional<double>(value) : std::nullopt;
}

jstring fingerprint(JNIEnv* env, jclass, jobjectArray paths) {
  return guarded(env, [&] { return to_java(env, foundation_fingerprint(to_paths(env, paths))).give(); });
}

jobject read(JNIEnv* env, jclass, jstring path) {
  return guarded(env, [&] {
    const std::shared_ptr<const Adapter> adapter = Adapter::read(to_path(env, path));
    std::vector<std::string> pairs;
    for (const auto& [key, value] : adapter->metadata()) {
      pairs.push_back(key);
      pairs.push_back(value);
    }
    std::vector<std::string> adapted;
    for (const LoraPair& pair : adapter->pairs()) {
      adapted.push_back(pair.module);
    }
    std::vector<std::string> reasons;
    for (const Error& error : adapter->problems()) {
      reasons.push_back(error.reason());
    }
    return make(
               env,
               "AdapterInfo",
               adapter->path(),
               adapter->foundation(),
               adapter->scale().has_value(),
               adapter->scale().value_or(0),
               pairs,
               adapted,
               reasons)
        .give();
  });
}

jlong save(
    JNIEnv* env,
    jclass,
    jstring path,
    jobjectArray names,
    jobjectArray tensors,
    jobjectArray foundation,
    jdouble scale) {
  return guarded(env, [&] {
    const NamedTensors given(env, names, tensors);
    return static_cast<jlong>(save_adapter(to_path(env, path), given.state_dict(), to_paths(env, foundation), scale));
  });
}

jlong load(JNIEnv* env, jclass, jlong tensors, jstring path, jboolean has_scale, jdouble scale, jdouble strength) {
  return guarded(env, [&] {
    AdapterOptions options;
    options.program_scale = given(has_scale, scale);
    options.strength = strength;
    return static_cast<jlong>(load_adapter(object<LogicalTensors>(tensors), to_path(env, path), options));
  });
}

jlong set_strength(JNIEnv* env, jclass, jlong tensors, jdouble strength) {
  return guarded(
      env, [&] { return static_cast<jlong>(set_adapter_strength(object<LogicalTensors>(tensors), strength)); });
}

jlong load_all(
    JNIEnv* env, jclass, jlong tensors, jobjectArray paths, jdoubleArray strengths, jboolean has_scale, jdouble scale) {
  return guarded(env, [&] {
    const std::vector<std::string> names = to_paths(env, paths);
    const std::vector<double> shares = to_doubles(env, strengths);
    if (names.size() != shares.size()) {
      throw Error(
          ErrorKind::Adapter,
          std::to_string(names.size()) + " adapters and " + std::to_string(shares.size()) + " strengths were given");
    }
    std::vector<AdapterShare> adapters;
    for (size_t i = 0; i < names.size(); ++i) {
      adapters.push_back({names[i], shares[i]});
    }
    return static_cast<jlong>(load_adapters(object<LogicalTensors>(tensors), adapters, given(has_scale, scale)));
  });
}

jlong set_strengths(JNIEnv* env, jclass, jlong tensors, jdoubleArray strengths) {
  return guarded(env, [&] {
    return static_cast<jlong>(set_adapter_strengths(object<LogicalTensors>(tensors), to_doubles(env, strengths)));
  });
}

jlong merge(JNIEnv* env, jclass, jlong tensors, jstring path, jdouble alpha) {
  return guarded(env, [&] {
    MergeOptions options;
    options.alpha = alpha;
    std::shared_ptr<MergedAdapter> merged = merge_adapter(object<LogicalTensors>(tensors), to_path(env, path), options);
    return share(std::move(merged));
  });
}

jobjectArray weights(JNIEnv* env, jclass, jlong merged) {
  return guarded(env, [&] { return to_java(env, object<MergedAdapter>(merged).weights()).give(); });
}

jlong generation(JNIEnv* env, jclass, jlong merged) {
  return guarded(env, [&] { return static_cast<jlong>(object<MergedAdapter>(merged).generation()); });
}

jboolean undone(JNIEnv* env, jclass, jlong merged) {
  return guarded(env, [&]() -> jboolean { return object<MergedAdapter>(merged).undone(); });
}

jlong undo(JNIEnv* env, jclass, jlong merged) {
  return guarded(env, [&] { return static_cast<jlong>(object<MergedAdapter>(merged).undo()); });
}

} // namespace

void add_adapters(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function("foundationFingerprint", "([Ljava/lang/String;)Ljava/lang/String;", &fingerprint),
       function("readAdapter", "(Ljava/lang/String;)Ldev/blobstore/AdapterInfo;", &read),
       function(
           "saveAdapter", "(Ljava/lang/String;[Ljava/lang/String;[Ldev/blobstore/Tensor;[Ljava/lang/String;D)J", &save),
       function("loadAdapter", "(JLjava/lang/String;ZDD)J", &load),
       function("setAdapterStrength", "(JD)J", &set_strength),
       function("loadAdapters", "(J[Ljava/lang/String;[DZD)J", &load_all),
       function("setAdapterStrengths", "(J[D)J", &set_strengths),
       function("mergeAdapter", "(JLjava/lang/String;D)J", &merge),
       function("mergedWeights", "(J)[Ljava/lang/String;", &weights),
       function("mergedGeneration", "(J)J", &generation),
       function("mergedUndone", "(J)Z", &undone),
       function("mergedUndo", "(J)J", &undo)});
}

} // namespace blobstore::java
