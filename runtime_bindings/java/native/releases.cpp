// What a device does about releases, in Java.
#include <blobstore/releases.h>

#include "convert.h"

namespace blobstore::java {
namespace {

/// @param texts those of ReleaseOptions.texts().
ReleaseOptions options_of(JNIEnv* env, jobjectArray texts, jboolean allow_rollback, jboolean plain) {
  const std::vector<std::string> all = to_strings(env, texts);
  ReleaseOptions options;
  options.sha256 = all.at(0);
  options.name = all.at(1);
  options.version = all.at(2);
  options.executorch = all.at(3);
  options.ways = all.at(4);
  options.allow_rollback = allow_rollback != JNI_FALSE;
  options.plain = plain != JNI_FALSE;
  return options;
}

/// An InstalledRelease of Java.
Local<> installed(JNIEnv* env, const InstalledRelease& done) {
  const Local<jstring> name = to_java(env, done.name);
  const Local<jstring> version = to_java(env, done.version);
  const Local<jstring> sha256 = to_java(env, done.sha256);
  const Local<jstring> path = to_java(env, done.path);
  return make(
      env,
      "InstalledRelease",
      "(Ljava/lang/String;Ljava/lang/String;Ljava/lang/String;Ljava/lang/String;ZJ)V",
      name.get(),
      version.get(),
      sha256.get(),
      path.get(),
      static_cast<jboolean>(done.changed),
      static_cast<jlong>(done.release_bytes));
}

jobject missing_of(
    JNIEnv* env,
    jclass,
    jstring index,
    jstring directory,
    jobjectArray texts,
    jboolean allow_rollback,
    jboolean plain) {
  return guarded(env, [&] {
    const Missing found =
        missing(to_path(env, index), to_path(env, directory), options_of(env, texts, allow_rollback, plain));
    const Local<jobjectArray> fetches = make_array(env, "Missing$Fetch", found.fetches, [env](const Fetch& one) {
      const Local<jstring> url = to_java(env, one.url);
      const Local<jstring> range = to_java(env, one.range);
      const Local<jstring> sha256 = to_java(env, one.sha256);
      const Local<jstring> file = to_java(env, one.file);
      return make(
          env,
          "Missing$Fetch",
          "(Ljava/lang/String;Ljava/lang/String;JLjava/lang/String;Ljava/lang/String;)V",
          url.get(),
          range.get(),
          static_cast<jlong>(one.size),
          sha256.get(),
          file.get());
    });
    const Local<jstring> name = to_java(env, found.name);
    const Local<jstring> version = to_java(env, found.version);
    const Local<jstring> sha256 = to_java(env, found.sha256);
    const Local<jstring> folder = to_java(env, found.folder);
    return make(
               env,
               "Missing",
               "(Ljava/lang/String;Ljava/lang/String;Ljava/lang/String;ZJJLjava/lang/String;"
               "[Ldev/blobstore/Missing$Fetch;)V",
               name.get(),
               version.get(),
               sha256.get(),
               static_cast<jboolean>(found.current),
               static_cast<jlong>(found.release_bytes),
               static_cast<jlong>(found.bytes),
               folder.get(),
               fetches.get())
        .give();
  });
}

jobject commit_of(
    JNIEnv* env,
    jclass,
    jstring index,
    jstring directory,
    jobjectArray texts,
    jboolean allow_rollback,
    jboolean plain) {
  return guarded(env, [&] {
    const InstalledRelease done =
        commit(to_path(env, index), to_path(env, directory), options_of(env, texts, allow_rollback, plain));
    return installed(env, done).give();
  });
}

jobject pull_of(
    JNIEnv* env,
    jclass,
    jstring url,
    jstring directory,
    jobjectArray texts,
    jboolean allow_rollback,
    jboolean plain,
    jobject download) {
  return guarded(env, [&] {
    const Local<jclass> type(env, env->GetObjectClass(download));
    const jmethodID method = checked(
        env, env->GetMethodID(type.get(), "fetch", "(Ljava/lang/String;Ljava/lang/String;Ljava/lang/String;)V"));
    const auto fetch = [&](const std::string& from, const std::string& range, const std::string& file) {
      const Local<jstring> source = to_java(env, from);
      const Local<jstring> bytes = to_java(env, range);
      const Local<jstring> target = to_java(env, file);
      env->CallVoidMethod(download, method, source.get(), bytes.get(), target.get());
      check(env); // what it threw goes to the caller
    };
    const InstalledRelease done =
        pull(to_string(env, url), to_path(env, directory), fetch, options_of(env, texts, allow_rollback, plain));
    return installed(env, done).give();
  });
}

jlongArray gc_of(JNIEnv* env, jclass, jstring directory, jlong keep) {
  return guarded(env, [&] {
    const Collected done = gc(to_path(env, directory), static_cast<uint64_t>(keep));
    const std::vector<jlong> values = {
        static_cast<jlong>(done.releases),
        static_cast<jlong>(done.files),
        static_cast<jlong>(done.nbytes),
        static_cast<jlong>(done.in_use)};
    return to_java(env, values).give();
  });
}

} // namespace

void add_releases(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function(
           "missing",
           "(Ljava/lang/String;Ljava/lang/String;[Ljava/lang/String;ZZ)Ldev/blobstore/Missing;",
           &missing_of),
       function(
           "commit",
           "(Ljava/lang/String;Ljava/lang/String;[Ljava/lang/String;ZZ)Ldev/blobstore/InstalledRelease;",
           &commit_of),
       function(
           "pull",
           "(Ljava/lang/String;Ljava/lang/String;[Ljava/lang/String;ZZLdev/blobstore/Releases$Download;)"
           "Ldev/blobstore/InstalledRelease;",
           &pull_of),
       function("gc", "(Ljava/lang/String;J)[J", &gc_of)});
}

} // namespace blobstore::java
