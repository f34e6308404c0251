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
  return make(
      env, "InstalledRelease", done.name, done.version, done.sha256, done.path, done.changed, done.release_bytes);
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
    const char* const kind = "Missing$Fetch";
    const Local<jobjectArray> fetches = make_array(env, kind, found.fetches, [&](const Fetch& one) {
      return make(env, kind, one.url, one.range, one.size, one.sha256, one.file);
    });
    return make(
               env,
               "Missing",
               found.name,
               found.version,
               found.sha256,
               found.current,
               found.release_bytes,
               found.bytes,
               found.folder,
               Objects{kind, fetches.get()})
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

/// @param data null for all data files.
jlong open_release(JNIEnv* env, jclass, jstring directory, jobjectArray data, jlong packed, jstring executorch) {
  return guarded(env, [&] {
    OpenOptions options;
    if (data != nullptr) {
      options.data = to_strings(env, data);
    }
    options.packed = shared<PackedStore>(packed);
    options.executorch = to_string(env, executorch);
    return share(Release::open(to_path(env, directory), options));
  });
}

jlong cache_of(JNIEnv* env, jclass, jlong release) {
  return guarded(env, [&] { return share(object<Release>(release).cache()); });
}

jobjectArray facts_of(JNIEnv* env, jclass, jlong handle) {
  return guarded(env, [&] {
    const auto& release = object<Release>(handle);
    const std::vector<std::string> facts = {release.name(), release.version(), release.sha256(), release.path()};
    return to_java(env, facts).give();
  });
}

jobjectArray files_of(JNIEnv* env, jclass, jlong release) {
  return guarded(env, [&] {
    return make_array(
               env,
               "InstalledFile",
               object<Release>(release).files(),
               [&](const InstalledFile& file) { return make(env, "InstalledFile", file.name, file.kind, file.data); })
        .give();
  });
}

jobject follow(JNIEnv* env, jclass, jlong release, jint adapters) {
  return guarded(env, [&] {
    const Followed done = object<Release>(release).follow(static_cast<FollowAdapters>(adapters));
    return make(
               env,
               "Followed",
               done.version,
               done.sha256,
               done.taken,
               done.keys,
               done.reasons,
               done.files,
               done.generation,
               done.adapters,
               done.unfit)
        .give();
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
       function("openRelease", "(Ljava/lang/String;[Ljava/lang/String;JLjava/lang/String;)J", &open_release),
       function("releaseCache", "(J)J", &cache_of),
       function("releaseFacts", "(J)[Ljava/lang/String;", &facts_of),
       function("releaseFiles", "(J)[Ldev/blobstore/InstalledFile;", &files_of),
       function("followRelease", "(JI)Ldev/blobstore/Followed;", &follow),
       function("gc", "(Ljava/lang/String;J)[J", &gc_of)});
}

} // namespace blobstore::java
