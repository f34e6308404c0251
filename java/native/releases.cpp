// What a device does about releases, in Java.
#include <blobstore/releases.h>

#include "crossing.h"

namespace blobstore::java {

template <>
struct Mirror<Fetch> {
  static constexpr const char* name = "Missing$Fetch";
  static auto fields(const Fetch& one) { return std::make_tuple(one.url, one.range, one.size, one.sha256, one.file); }
};

template <>
struct Mirror<Missing> {
  static constexpr const char* name = "Missing";
  static auto fields(const Missing& found) {
    return std::make_tuple(
        found.name,
        found.version,
        found.sha256,
        found.current,
        found.release_bytes,
        found.bytes,
        found.folder,
        found.fetches);
  }
};

template <>
struct Mirror<InstalledRelease> {
  static constexpr const char* name = "InstalledRelease";
  static auto fields(const InstalledRelease& done) {
    return std::make_tuple(done.name, done.version, done.sha256, done.path, done.changed, done.release_bytes);
  }
};

template <>
struct Mirror<InstalledFile> {
  static constexpr const char* name = "InstalledFile";
  static auto fields(const InstalledFile& file) { return std::make_tuple(file.name, file.kind, file.data); }
};

template <>
struct Mirror<Followed> {
  static constexpr const char* name = "Followed";
  static auto fields(const Followed& done) {
    return std::make_tuple(
        done.version,
        done.sha256,
        done.taken,
        done.keys,
        done.reasons,
        done.files,
        done.generation,
        done.adapters,
        done.unfit);
  }
};

template <>
struct Crossing<ReleaseOptions> {
  using Java = jobject;
  static std::string signature() { return "Ldev/blobstore/ReleaseOptions;"; }
  static ReleaseOptions from(JNIEnv* env, jobject given) {
    const Local<jclass> type(env, env->GetObjectClass(not_null(env, given, "the options are null")));
    const auto text = [&](const char* name) {
      const jfieldID field = checked(env, env->GetFieldID(type.get(), name, "Ljava/lang/String;"));
      const Local<jstring> value(env, static_cast<jstring>(env->GetObjectField(given, field)));
      return to_string(env, value.get());
    };
    const auto flag = [&](const char* name) {
      return env->GetBooleanField(given, checked(env, env->GetFieldID(type.get(), name, "Z"))) != JNI_FALSE;
    };
    ReleaseOptions options;
    options.sha256 = text("sha256");
    options.name = text("name");
    options.version = text("version");
    options.allow_rollback = flag("allowRollback");
    options.executorch = text("executorch");
    options.ways = text("ways");
    options.plain = flag("plain");
    return options;
  }
};

namespace {

/// The downloader of the application, during a call.
struct Downloader {
  JNIEnv* env;
  jobject download;

  void operator()(const std::string& url, const std::string& range, const std::string& file) const {
    const Local<jclass> type(env, env->GetObjectClass(download));
    const jmethodID fetch = checked(
        env, env->GetMethodID(type.get(), "fetch", "(Ljava/lang/String;Ljava/lang/String;Ljava/lang/String;)V"));
    const Local<jstring> source = to_java(env, url);
    const Local<jstring> bytes = to_java(env, range);
    const Local<jstring> target = to_java(env, file);
    env->CallVoidMethod(download, fetch, source.get(), bytes.get(), target.get());
    check(env); // what it threw goes to the caller
  }
};

} // namespace

template <>
struct Crossing<Downloader> {
  using Java = jobject;
  static std::string signature() { return "Ldev/blobstore/Releases$Download;"; }
  static Downloader from(JNIEnv* env, jobject download) { return {env, download}; }
};

namespace {

Missing missing_of(const Path& index, const Path& directory, const ReleaseOptions& options) {
  return missing(index.text, directory.text, options);
}

InstalledRelease commit_of(const Path& index, const Path& directory, const ReleaseOptions& options) {
  return commit(index.text, directory.text, options);
}

InstalledRelease pull_of(
    const std::string& url, const Path& directory, const ReleaseOptions& options, const Downloader& download) {
  return pull(url, directory.text, download, options);
}

std::vector<uint64_t> gc_of(const Path& directory, uint64_t keep) {
  const Collected done = gc(directory.text, keep);
  return {done.releases, done.files, done.nbytes, done.in_use};
}

/// @param data null for all data files.
std::shared_ptr<Release> open(
    const Path& directory,
    const std::optional<std::vector<std::string>>& data,
    const std::shared_ptr<PackedStore>& packed,
    const std::string& executorch) {
  return Release::open(directory.text, {data, packed, executorch});
}

std::vector<std::string> facts_of(const Release& release) {
  return {release.name(), release.version(), release.sha256(), release.path()};
}

} // namespace

std::vector<Row> release_rows() {
  return {
      row<&missing_of>("missing"),
      row<&commit_of>("commit"),
      row<&pull_of>("pull"),
      row<&open>("openRelease"),
      row<&Release::cache>("releaseCache"),
      row<&facts_of>("releaseFacts"),
      row<&Release::files>("releaseFiles"),
      row<&Release::follow>("followRelease"),
      row<&gc_of>("gc")};
}

} // namespace blobstore::java
