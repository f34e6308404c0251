// Requests to language models in Java. Java calls the runners.
#include <blobstore/delegate.h>
#include <blobstore/runners.h>

#include "convert.h"

namespace blobstore::java {
namespace {

using Turn = RunnerQueue::Turn;

jlong make_queue(JNIEnv* env, jclass, jlongArray caches, jboolean has_scale, jdouble scale) {
  return guarded(env, [&] {
    std::vector<jlong> handles(static_cast<size_t>(env->GetArrayLength(caches)));
    env->GetLongArrayRegion(caches, 0, static_cast<jsize>(handles.size()), handles.data());
    check(env);
    std::vector<std::shared_ptr<BlobCache>> all;
    for (const jlong handle : handles) {
      all.push_back(shared<BlobCache>(handle));
    }
    return share(
        std::make_shared<RunnerQueue>(all, has_scale != JNI_FALSE ? std::optional<double>(scale) : std::nullopt));
  });
}

void set_adapter(JNIEnv* env, jclass, jlong queue, jstring name, jstring path) {
  guarded(env, [&] { object<RunnerQueue>(queue).set_adapter(to_string(env, name), to_path(env, path)); });
}

void remove_adapter(JNIEnv* env, jclass, jlong queue, jstring name) {
  guarded(env, [&] { object<RunnerQueue>(queue).remove_adapter(to_string(env, name)); });
}

jobjectArray adapters(JNIEnv* env, jclass, jlong queue) {
  return guarded(env, [&] { return to_java(env, object<RunnerQueue>(queue).adapters()).give(); });
}

jlongArray stats(JNIEnv* env, jclass, jlong queue) {
  return guarded(env, [&] {
    const RunnerStats now = object<RunnerQueue>(queue).stats();
    std::vector<jlong> numbers;
    for (const uint64_t number : {now.answered, now.failed, now.exchanges, now.continued, now.waiting, now.running}) {
      numbers.push_back(static_cast<jlong>(number));
    }
    return to_java(env, numbers).give();
  });
}

void close(JNIEnv*, jclass, jlong queue) {
  object<RunnerQueue>(queue).close();
}

/// @returns 0 if the request was stopped while it waited.
jlong begin(
    JNIEnv* env,
    jclass,
    jlong queue,
    jstring prompt,
    jstring adapter,
    jdouble strength,
    jlong conversation,
    jlong stop) {
  return guarded(env, [&]() -> jlong {
    std::unique_ptr<Turn> turn = object<RunnerQueue>(queue).begin(
        to_string(env, prompt),
        {to_string(env, adapter), strength, shared<Conversation>(conversation), shared<Stop>(stop)});
    return turn == nullptr ? 0 : share(std::shared_ptr<Turn>(std::move(turn)));
  });
}

jint turn_runner(JNIEnv*, jclass, jlong turn) {
  return static_cast<jint>(object<Turn>(turn).runner());
}

jboolean turn_resets(JNIEnv*, jclass, jlong turn) {
  return static_cast<jboolean>(object<Turn>(turn).resets());
}

jstring turn_prompt(JNIEnv* env, jclass, jlong turn) {
  return guarded(env, [&] { return to_java(env, object<Turn>(turn).prompt()).give(); });
}

jboolean turn_stopped(JNIEnv*, jclass, jlong turn) {
  return static_cast<jboolean>(object<Turn>(turn).stopped());
}

void turn_finish(JNIEnv* env, jclass, jlong turn, jstring answer, jstring last) {
  guarded(env, [&] { object<Turn>(turn).finish(to_string(env, answer), to_string(env, last)); });
}

/// A scope of this thread, which the thread must free.
jlong enter_scope(JNIEnv* env, jclass, jlong cache) {
  return guarded(env, [&] {
    register_delegate();
    return share(std::make_shared<CacheScope>(shared<BlobCache>(cache)));
  });
}

jlong make_conversation(JNIEnv* env, jclass, jstring text) {
  return guarded(env, [&] { return share(std::make_shared<Conversation>(to_string(env, text))); });
}

jstring conversation_text(JNIEnv* env, jclass, jlong conversation) {
  return guarded(env, [&] { return to_java(env, object<Conversation>(conversation).text()).give(); });
}

jlong make_stop(JNIEnv* env, jclass) {
  return guarded(env, [&] { return share(std::make_shared<Stop>()); });
}

void set_stop(JNIEnv*, jclass, jlong stop) {
  object<Stop>(stop).set();
}

jboolean is_stop_set(JNIEnv*, jclass, jlong stop) {
  return static_cast<jboolean>(object<Stop>(stop).is_set());
}

} // namespace

void add_requests(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function("makeQueue", "([JZD)J", &make_queue),
       function("queueSetAdapter", "(JLjava/lang/String;Ljava/lang/String;)V", &set_adapter),
       function("queueRemoveAdapter", "(JLjava/lang/String;)V", &remove_adapter),
       function("queueAdapters", "(J)[Ljava/lang/String;", &adapters),
       function("queueStats", "(J)[J", &stats),
       function("queueClose", "(J)V", &close),
       function("queueBegin", "(JLjava/lang/String;Ljava/lang/String;DJJ)J", &begin),
       function("turnRunner", "(J)I", &turn_runner),
       function("turnResets", "(J)Z", &turn_resets),
       function("turnPrompt", "(J)Ljava/lang/String;", &turn_prompt),
       function("turnStopped", "(J)Z", &turn_stopped),
       function("turnFinish", "(JLjava/lang/String;Ljava/lang/String;)V", &turn_finish),
       function("enterScope", "(J)J", &enter_scope),
       function("makeConversation", "(Ljava/lang/String;)J", &make_conversation),
       function("conversationText", "(J)Ljava/lang/String;", &conversation_text),
       function("makeStop", "()J", &make_stop),
       function("setStop", "(J)V", &set_stop),
       function("isStopSet", "(J)Z", &is_stop_set)});
}

} // namespace blobstore::java
