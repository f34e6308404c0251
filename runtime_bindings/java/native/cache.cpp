// BlobCache in Java.
#include <cstring>

#include <blobstore/cache.h>
#include <blobstore/packed.h>
#include <blobstore/reading.h>

#include "convert.h"

namespace blobstore::java {
namespace {

jlong open(JNIEnv* env, jclass, jobjectArray paths, jint mode, jlong base, jlong packed) {
  return guarded(env, [&] {
    return share(
        BlobCache::open(
            to_paths(env, paths),
            static_cast<BlobCache::Mode>(mode),
            shared<BlobCache>(base),
            shared<PackedStore>(packed)));
  });
}

jstring name(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&] { return to_java(env, object<BlobCache>(cache).name()).give(); });
}

jobjectArray keys(JNIEnv* env, jclass, jlong handle) {
  return guarded(env, [&] {
    const auto& cache = object<BlobCache>(handle);
    std::vector<std::string> found;
    for (size_t i = 0; i < cache.size(); ++i) {
      found.push_back(cache.blob(i).key);
    }
    return to_java(env, found).give();
  });
}

jboolean contains(JNIEnv* env, jclass, jlong cache, jstring key) {
  return guarded(env, [&]() -> jboolean { return object<BlobCache>(cache).find(to_string(env, key)) != nullptr; });
}

jboolean owns(JNIEnv* env, jclass, jlong cache, jstring key) {
  return guarded(env, [&]() -> jboolean { return object<BlobCache>(cache).owns(to_string(env, key)); });
}

jobject blob(JNIEnv* env, jclass, jlong handle, jstring key) {
  return guarded(env, [&] {
    const auto& cache = object<BlobCache>(handle);
    const Blob& found = cache.at(to_string(env, key));
    if (!found.layout && found.size > INT32_MAX) {
      throw Error(ErrorKind::UnsupportedData, "'" + found.key + "' is larger than a ByteBuffer can be");
    }
    NewTensor made = new_tensor(env, found.layout ? *found.layout : Layout{0, {static_cast<int32_t>(found.size)}, {}});
    if (found.size != 0) {
      const BlobCache::Reading reading(cache);
      std::memcpy(made.data, found.data, found.size);
    }
    return made.tensor.give();
  });
}

jlong generation(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&] { return static_cast<jlong>(object<BlobCache>(cache).generation()); });
}

jlong version(JNIEnv* env, jclass, jlong cache, jstring key) {
  return guarded(env, [&] { return static_cast<jlong>(object<BlobCache>(cache).version(to_string(env, key))); });
}

jlong update(JNIEnv* env, jclass, jlong handle, jobjectArray names, jobjectArray tensors) {
  return guarded(env, [&] {
    auto& cache = object<BlobCache>(handle);
    const NamedTensors given(env, names, tensors);
    std::vector<std::optional<Layout>> layouts(given.views().size());
    std::vector<Change> changes;
    for (size_t i = 0; i < given.views().size(); ++i) {
      const View& view = given.views()[i];
      const Blob* blob = cache.find(given.names()[i]);
      const bool compared = blob != nullptr && blob->layout;
      if (compared) {
        layouts[i] = view.layout();
      }
      changes.push_back({given.names()[i], view.data, view.nbytes, compared ? &layouts[i] : nullptr});
    }
    return static_cast<jlong>(cache.update(changes));
  });
}

jlong load(JNIEnv* env, jclass, jlong cache, jstring path) {
  return guarded(env, [&] { return static_cast<jlong>(object<BlobCache>(cache).load(to_path(env, path))); });
}

jlong revert(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&] { return static_cast<jlong>(object<BlobCache>(cache).revert()); });
}

jlong revert_keys(JNIEnv* env, jclass, jlong cache, jobjectArray keys) {
  return guarded(env, [&] { return static_cast<jlong>(object<BlobCache>(cache).revert(to_strings(env, keys))); });
}

jlong save(JNIEnv* env, jclass, jlong cache, jstring path, jboolean dirty_only) {
  return guarded(env, [&] {
    return static_cast<jlong>(object<BlobCache>(cache).save(to_path(env, path), dirty_only != JNI_FALSE));
  });
}

jobjectArray dirty(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&] { return to_java(env, object<BlobCache>(cache).dirty()).give(); });
}

void check_files(JNIEnv* env, jclass, jlong cache) {
  guarded(env, [&] { object<BlobCache>(cache).check_files(); });
}

jboolean verify(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&]() -> jboolean { return object<BlobCache>(cache).verify(); });
}

jlongArray stats(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&] {
    const CacheStats found = object<BlobCache>(cache).stats();
    const auto measured = [](const std::optional<uint64_t>& value) { return value ? static_cast<jlong>(*value) : -1; };
    const std::vector<jlong> values = {
        static_cast<jlong>(found.keys),
        static_cast<jlong>(found.mapped_bytes),
        measured(found.resident_bytes),
        measured(found.private_bytes),
        static_cast<jlong>(found.dirty_keys),
        static_cast<jlong>(found.dirty_bytes),
        static_cast<jlong>(found.commits),
        static_cast<jlong>(found.reverts)};
    return to_java(env, values).give();
  });
}

jlong working_copy(JNIEnv* env, jclass, jobjectArray paths, jstring target) {
  return guarded(
      env, [&] { return static_cast<jlong>(make_working_copy(to_paths(env, paths), to_path(env, target))); });
}

} // namespace

void add_cache(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function("openCache", "([Ljava/lang/String;IJJ)J", &open),
       function("cacheName", "(J)Ljava/lang/String;", &name),
       function("cacheKeys", "(J)[Ljava/lang/String;", &keys),
       function("cacheContains", "(JLjava/lang/String;)Z", &contains),
       function("cacheOwns", "(JLjava/lang/String;)Z", &owns),
       function("cacheBlob", "(JLjava/lang/String;)Ldev/blobstore/Tensor;", &blob),
       function("cacheGeneration", "(J)J", &generation),
       function("cacheVersion", "(JLjava/lang/String;)J", &version),
       function("cacheUpdate", "(J[Ljava/lang/String;[Ldev/blobstore/Tensor;)J", &update),
       function("cacheLoad", "(JLjava/lang/String;)J", &load),
       function("cacheRevert", "(J)J", &revert),
       function("cacheRevertKeys", "(J[Ljava/lang/String;)J", &revert_keys),
       function("cacheSave", "(JLjava/lang/String;Z)J", &save),
       function("cacheDirty", "(J)[Ljava/lang/String;", &dirty),
       function("cacheCheckFiles", "(J)V", &check_files),
       function("cacheVerify", "(J)Z", &verify),
       function("cacheStats", "(J)[J", &stats),
       function("makeWorkingCopy", "([Ljava/lang/String;Ljava/lang/String;)J", &working_copy)});
}

} // namespace blobstore::java
