// PackedStore in Java.
#include <blobstore/packed.h>

#include "convert.h"

namespace blobstore::java {
namespace {

jobjectArray files(JNIEnv* env, const std::vector<PackedFile>& found) {
  return make_array(
             env,
             "PackedFile",
             found,
             [env](const PackedFile& file) {
               return make(
                   env,
                   "PackedFile",
                   file.path,
                   file.size,
                   file.entries,
                   file.mapped,
                   file.used,
                   file.in_use,
                   file.problem);
             })
      .give();
}

jlong open(JNIEnv* env, jclass, jstring folder, jlong limit, jboolean verify, jlong read_ahead) {
  return guarded(env, [&] {
    PackedOptions options;
    options.limit = static_cast<uint64_t>(limit);
    options.verify = verify != JNI_FALSE;
    options.read_ahead = static_cast<uint64_t>(read_ahead);
    return share(PackedStore::open(to_path(env, folder), options));
  });
}

jobject stats(JNIEnv* env, jclass, jlong store) {
  return guarded(env, [&] {
    const PackedStats found = object<PackedStore>(store).stats();
    std::vector<std::string> why;
    std::vector<jlong> often;
    for (const auto& [reason, count] : found.reasons) {
      why.push_back(reason);
      often.push_back(static_cast<jlong>(count));
    }
    std::vector<jlong> numbers;
    for (const uint64_t number :
         {found.hits,
          found.builds,
          found.fallbacks,
          found.written,
          found.repacked,
          found.dropped,
          found.verified_bytes,
          found.mapped_bytes}) {
      numbers.push_back(static_cast<jlong>(number));
    }
    return make(env, "PackedStats", numbers, why, often).give();
  });
}

jobjectArray list(JNIEnv* env, jclass, jlong store) {
  return guarded(env, [&] { return files(env, object<PackedStore>(store).list()); });
}

jobjectArray verify(JNIEnv* env, jclass, jlong store) {
  return guarded(env, [&] { return files(env, object<PackedStore>(store).verify()); });
}

jobjectArray gc(JNIEnv* env, jclass, jlong store) {
  return guarded(env, [&] { return files(env, object<PackedStore>(store).gc()); });
}

} // namespace

void add_packed(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function("openPacked", "(Ljava/lang/String;JZJ)J", &open),
       function("packedStats", "(J)Ldev/blobstore/PackedStats;", &stats),
       function("packedList", "(J)[Ldev/blobstore/PackedFile;", &list),
       function("packedVerify", "(J)[Ldev/blobstore/PackedFile;", &verify),
       function("packedGc", "(J)[Ldev/blobstore/PackedFile;", &gc)});
}

} // namespace blobstore::java
