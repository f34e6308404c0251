// What happens when Java loads the library, and when the process ends.
#include <cstdlib>

#include <jni.h>

#include <blobstore/program.h>

#include "crossing.h"

namespace blobstore::java {
namespace {

void free_share(jlong object) {
  delete reinterpret_cast<std::shared_ptr<void>*>(object);
}

/// No daemon thread may be in a kernel when static objects are destroyed. Functions that are registered last run first,
/// before what ExecuTorch made meanwhile is destroyed.
void end_first() {
  (void)std::atexit(&end_calls);
}

} // namespace
} // namespace blobstore::java

extern "C" JNIEXPORT jint JNI_OnLoad(JavaVM* machine, void*) {
  using namespace blobstore::java;
  JNIEnv* env = nullptr;
  if (machine->GetEnv(reinterpret_cast<void**>(&env), JNI_VERSION_1_6) != JNI_OK) {
    return JNI_ERR;
  }
  return guarded(env, [env]() -> jint { // 0 is no version, so loading fails
    find_classes(env);
    std::vector<Row> rows = {row<&free_share>("free"), row<&end_first>("endFirst")};
    for (const auto& more :
         {adapter_rows(),
          cache_rows(),
          packed_rows(),
          program_rows(),
          release_rows(),
          request_rows(),
          tensor_rows(),
          training_rows()}) {
      rows.insert(rows.end(), more.begin(), more.end());
    }
    std::vector<JNINativeMethod> functions;
    for (Row& one : rows) { // JNI takes its texts without const and never writes to them
      functions.push_back({const_cast<char*>(one.name), one.signature.data(), one.pointer});
    }
    const Local<jclass> native(env, checked(env, env->FindClass("dev/blobstore/Native")));
    if (env->RegisterNatives(native.get(), functions.data(), static_cast<jint>(functions.size())) != JNI_OK) {
      throw Pending();
    }
    (void)std::atexit(&blobstore::end_calls); // for Runtime.halt, which runs no hooks
    return JNI_VERSION_1_6;
  });
}
