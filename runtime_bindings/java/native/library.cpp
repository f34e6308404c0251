// What happens when Java loads the library, and when the process ends.
#include <atomic>
#include <cstdlib>

#include <jni.h>

#include "convert.h"
#include "os/process_end.h"

namespace blobstore::java {
namespace {

/// No daemon thread may be in a kernel when static objects are destroyed.
void end() {
  static std::atomic<bool> ended{false};
  if (!ended.exchange(true)) {
    internal::end_backend_work();
  }
}

void free(JNIEnv*, jclass, jlong object) {
  delete reinterpret_cast<std::shared_ptr<void>*>(object);
}

/// Functions that are registered last run first, before what ExecuTorch made meanwhile is destroyed.
void end_first(JNIEnv*, jclass) {
  (void)std::atexit(&end);
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
    std::vector<JNINativeMethod> functions{
        function("free", "(J)V", &blobstore::java::free), function("endFirst", "()V", &end_first)};
    add_adapters(functions);
    add_cache(functions);
    add_packed(functions);
    add_programs(functions);
    add_releases(functions);
    add_requests(functions);
    add_tensors(functions);
    add_training(functions);
    const Local<jclass> native(env, checked(env, env->FindClass("dev/blobstore/Native")));
    if (env->RegisterNatives(native.get(), functions.data(), static_cast<jint>(functions.size())) != JNI_OK) {
      throw Pending();
    }
    (void)std::atexit(&end); // for Runtime.halt, which runs no hooks
    return JNI_VERSION_1_6;
  });
}
