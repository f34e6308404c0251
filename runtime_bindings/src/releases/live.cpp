// A release in a running program: a cache on its data files, and newer releases taken into it without loading again.

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/releases.h>

#include "cache/release_commit.h"
#include "format/constants.h"
#include "format/ptd_file.h"
#include "os/fork.h"
#include "os/link_tree.h"
#include "os/text.h"
#include "releases/device.h"
#include "releases/index.h"

namespace blobstore::internal {
namespace {

/// A key in a data file.
struct Place {
  const PtdFile* file = nullptr;
  size_t index = 0;

  const std::string& key() const { return file->entry(index).key; }
  const std::optional<Layout>& layout() const { return file->entry(index).layout; }
  SourceBlob blob() const { return file->blob(index); }
};

/// Whether the blob of a key can take the place of another one in a cache: its size and layout are the same, and it is
/// not one of the records that describe other blobs.
bool is_replaceable(const Place& old, const Place& other) {
  return old.key().rfind(kKeyPrefix, 0) != 0 && old.blob().size == other.blob().size && old.layout() == other.layout();
}

/// The names of files of some kinds, in the order of the index.
std::vector<std::string> names_of(const ReleaseIndex& index, const std::set<std::string_view>& kinds) {
  std::vector<std::string> found;
  for (const ReleaseFile& file : index.files) {
    if (kinds.count(file.kind) != 0) {
      found.push_back(file.name);
    }
  }
  return found;
}

/// The data files of one release, and for each key the file that has it.
class Data {
 public:
  /// @param installed, index: used as long as this lives. @param names of the data files; empty for all but adapters.
  /// @throws Error as `Release::open`.
  Data(const Installed& installed, const ReleaseIndex& index, const std::optional<std::vector<std::string>>& names)
      : installed_(installed), index_(index) {
    for (const std::string& name : names ? *names : names_of(index, {"data"})) {
      const ReleaseFile* const file = index.find(name);
      if (file == nullptr || !file->is_data()) {
        throw_unknown(name);
      }
      if (digests_.emplace(name, file->object.sha256).second) {
        files_.push_back(std::make_unique<PtdFile>(installed.file(file->object.sha256)));
        files_.back()->check_length();
        add(name, *files_.back());
      }
    }
  }

  /// The paths of the files.
  std::vector<std::string> paths() const {
    std::vector<std::string> found;
    for (const auto& file : files_) {
      found.push_back(file->name());
    }
    return found;
  }
  /// The names of the files, with their digests.
  const std::map<std::string, std::string>& digests() const { return digests_; }
  /// Each key once, in the order of the files.
  const std::vector<Place>& places() const { return places_; }
  const Place* find(std::string_view key) const {
    const auto found = by_key_.find(key);
    return found == by_key_.end() ? nullptr : &places_[found->second];
  }
  /// Whether a file of another release has the same bytes and layout under a key as one of this release.
  /// @throws Error FileAccess, Integrity: the list of parts of a release is gone or damaged.
  bool is_same(const Place& one, const Data& other, const Place& two) const {
    if (one.layout() != two.layout()) {
      return false;
    }
    const std::string* const digest = sha256(one);
    const std::string* const digest_of_other = other.sha256(two);
    if (digest != nullptr && digest_of_other != nullptr) {
      return *digest == *digest_of_other;
    }
    const SourceBlob a = one.blob(); // it is a part together with other bytes
    const SourceBlob b = two.blob();
    return a.size == b.size && (a.size == 0 || std::memcmp(a.data, b.data, a.size) == 0);
  }

 private:
  /// The digest of a blob that is a part of its file, by which the file was checked when it was installed.
  const std::string* sha256(const Place& place) const {
    if (!parts_) {
      parts_ = installed_.parts(index_);
      const std::vector<const ReleaseFile*> files = index_.distinct();
      for (size_t i = 0; i < files.size(); ++i) {
        for (const ReleasePart& part : parts_->files[i]) {
          contents_[installed_.file(files[i]->object.sha256)][{part.offset, part.size}] = part.content;
        }
      }
    }
    const SourceBlob blob = place.blob();
    const auto& contents = contents_[place.file->name()];
    const auto found = contents.find({static_cast<uint64_t>(blob.data - place.file->bytes().first), blob.size});
    return blob.size == 0 || found == contents.end() ? nullptr : &parts_->contents[found->second].sha256;
  }

  [[noreturn]] void throw_unknown(const std::string& name) const {
    const std::vector<std::string> possible = names_of(index_, {"data", "adapter"});
    throw_error_in(
        ErrorKind::Release,
        installed_.name(),
        "{} {} has no data file '{}'; it has {}",
        index_.name,
        index_.version,
        name,
        possible.empty() ? "none" : in_quotes(possible));
  }

  void add(const std::string& name, const PtdFile& file) {
    for (size_t i = 0; i < file.size(); ++i) {
      const Place place{&file, i};
      const auto [known, is_new] = by_key_.emplace(place.key(), places_.size());
      if (is_new) {
        places_.push_back(place);
      } else if (!is_same(places_[known->second], *this, place)) {
        throw_error_in(
            ErrorKind::Release,
            installed_.name(),
            "the key '{}' of data file '{}' has other contents in another data file; open only one of them",
            place.key(),
            name);
      }
    }
  }

  const Installed& installed_;
  const ReleaseIndex& index_;
  mutable std::optional<ReleaseParts> parts_; // read when it is needed
  mutable std::map<std::string, std::map<std::pair<uint64_t, uint64_t>, size_t>>
      contents_; // by path; of offset and size
  std::vector<std::unique_ptr<PtdFile>> files_;
  std::map<std::string, std::string> digests_;
  std::vector<Place> places_;
  TextMap<size_t> by_key_;
};

/// A release that is locked against `gc`.
struct Held {
  std::string view;
  File lock;
};

/// Lock the current release. @throws Error Release: there is none.
Held hold_current(const Installed& installed) {
  for (;;) {
    std::string view = installed.view();
    if (view.empty()) {
      throw_error_in(ErrorKind::Release, installed.name(), "no release is installed here");
    }
    try {
      File lock = share_folder(installed.release(view));
      if (installed.view() == view) {
        return {std::move(view), std::move(lock)};
      }
    } catch (const Error&) {
      if (installed.view() == view) {
        throw;
      }
    } // a newer one came, and perhaps `gc` removed this one
  }
}

/// The names of files of some kinds that are new, changed or gone.
std::vector<std::string> differing(
    const ReleaseIndex& old, const ReleaseIndex& other, const std::set<std::string_view>& kinds) {
  std::map<std::string, std::vector<const std::string*>> digests; // one for each release that has the name
  for (const ReleaseIndex* const index : {&old, &other}) {
    for (const ReleaseFile& file : index->files) {
      if (kinds.count(file.kind) != 0) {
        digests[file.name].push_back(&file.object.sha256);
      }
    }
  }
  std::vector<std::string> found;
  for (const auto& [name, of_name] : digests) {
    if (of_name.size() == 1 || *of_name[0] != *of_name[1]) {
      found.push_back(name);
    }
  }
  return found;
}

/// The paths of the adapters of a release, by name.
std::map<std::string, std::string> adapters_of(const ReleaseIndex& index, const std::string& folder) {
  std::map<std::string, std::string> found;
  for (const std::string& name : names_of(index, {"adapter"})) {
    found.emplace(name, format("{}/{}", folder, name));
  }
  return found;
}

class LiveRelease final : public Release, private ForkAware {
 public:
  LiveRelease(const std::string& directory, const OpenOptions& options)
      : installed_(directory), names_(options.data), held_(hold_current(installed_)) {
    index_ = installed_.index(held_.view);
    index_.check_executorch(options.executorch, installed_.name());
    cache_ =
        BlobCache::open(Data(installed_, index_, names_).paths(), BlobCache::Mode::Private, nullptr, options.packed);
    enter();
  }
  ~LiveRelease() override { leave(); }

  std::string name() const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return index_.name;
  }
  std::string version() const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return index_.version;
  }
  std::string sha256() const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return held_.view;
  }
  std::string path() const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return installed_.release(held_.view);
  }
  std::vector<InstalledFile> files() const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::vector<InstalledFile> found;
    for (const ReleaseFile& file : index_.files) {
      found.push_back({file.name, file.kind, file.data});
    }
    return found;
  }
  const std::shared_ptr<BlobCache>& cache() const override { return cache_; }

  Followed follow(FollowAdapters adapters) override;
  void close() override {
    const std::lock_guard<std::mutex> turn(turn_);
    closed_ = true;
    cache_->close();
    held_.lock = File();
  }

 private:
  std::vector<Change> compare(const Data& old, const Data& other, std::vector<std::string>& reasons) const;
  bool is_named(const std::string& name) const;
  void commit(const Data& old, ReleaseCommit& commit, Followed& done) const;

  void after_fork_in_child() override {
    renew(turn_);
    renew(mutex_);
  }

  const Installed installed_;
  const std::optional<std::vector<std::string>> names_;
  std::shared_ptr<BlobCache> cache_;
  std::mutex turn_; // one thread follows at a time; guards closed_
  bool closed_ = false;
  mutable std::mutex mutex_; // guards what follows; taken last
  Held held_;
  ReleaseIndex index_;
};

/// Whether the caller named a data file, so that it is in the cache.
bool LiveRelease::is_named(const std::string& name) const {
  return names_ && std::find(names_->begin(), names_->end(), name) != names_->end();
}

Followed LiveRelease::follow(FollowAdapters adapters) {
  const std::lock_guard<std::mutex> turn(turn_);
  if (closed_) {
    throw_error_in(ErrorKind::Closed, installed_.name(), "the release is closed");
  }
  Held held = hold_current(installed_);
  Followed done;
  done.sha256 = held.view;
  done.generation = cache_->generation();
  done.version = index_.version;
  done.taken = true;
  if (done.sha256 == held_.view) { // only this thread changes it
    return done;
  }
  ReleaseIndex index = installed_.index(done.sha256);
  done.version = index.version;
  done.files = differing(index_, index, {"adapter", "other"});
  done.files.erase(
      std::remove_if(done.files.begin(), done.files.end(), [this](const std::string& name) { return is_named(name); }),
      done.files.end());
  for (const std::string& name : differing(index_, index, {"program"})) {
    done.reasons.push_back(format("the program '{}' changed", name));
  }
  if (done.reasons.empty()) {
    const Data old(installed_, index_, names_); // the lock keeps its files
    for (const auto& [name, digest] : old.digests()) {
      const ReleaseFile* const file = index.find(name);
      if (file == nullptr || !file->is_data()) {
        done.reasons.push_back(format("the data file '{}' is gone", name));
      }
    }
    if (done.reasons.empty()) {
      const Data other(installed_, index, names_);
      ReleaseCommit all;
      all.cache = cache_;
      all.choice = adapters;
      all.changes = compare(old, other, done.reasons);
      all.before = adapters_of(index_, installed_.release(held_.view));
      all.after = adapters_of(index, installed_.release(held.view));
      if (done.reasons.empty()) {
        commit(old, all, done);
      }
    }
  }
  if (!done.reasons.empty()) {
    done.taken = false;
    return done;
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  std::swap(held_, held);
  index_ = std::move(index);
  return done;
}

/// Commit the blobs that differ, or say in `done` why not.
void LiveRelease::commit(const Data& old, ReleaseCommit& commit, Followed& done) const {
  commit.generation = done.generation;
  if (const auto with_adapters = commit_release_under_adapters.load()) {
    for (const std::string& key : cache_->dirty()) {
      if (const Place* const place = old.find(key)) {
        commit.held.emplace(key, ReleaseCommit::Bytes{place->blob().data, place->blob().size});
      }
    }
    with_adapters(commit);
  } else if (!commit.changes.empty()) {
    commit.generation = cache_->update(commit.changes);
  }
  done.generation = commit.generation;
  done.reasons = std::move(commit.reasons);
  done.adapters = std::move(commit.adapters);
  done.unfit = std::move(commit.unfit);
  if (done.reasons.empty()) {
    for (const Change& change : commit.changes) {
      done.keys.push_back(change.key);
    }
    const auto is_taken = [&](const std::string& name) {
      return std::find(done.adapters.begin(), done.adapters.end(), name) != done.adapters.end();
    };
    done.files.erase(std::remove_if(done.files.begin(), done.files.end(), is_taken), done.files.end());
  }
}

/// The blobs that differ; they refer to the files of `other`.
/// @param reasons gets what else differs, in the order of its text.
std::vector<Change> LiveRelease::compare(const Data& old, const Data& other, std::vector<std::string>& reasons) const {
  for (const auto& [name, digest] : other.digests()) {
    if (old.digests().count(name) == 0) {
      reasons.push_back(format("the data file '{}' is new", name));
    }
  }
  if (!reasons.empty()) {
    return {};
  }
  std::vector<Change> changes;
  for (const Place& place : old.places()) {
    if (other.find(place.key()) == nullptr) {
      reasons.push_back(format("the key '{}' is gone", place.key()));
    }
  }
  for (const Place& place : other.places()) {
    const Place* const before = old.find(place.key());
    if (before == nullptr) {
      reasons.push_back(format("the key '{}' is new", place.key()));
    } else if (before->file->name() != place.file->name() && !old.is_same(*before, other, place)) {
      if (is_replaceable(*before, place)) {
        const SourceBlob blob = place.blob();
        changes.emplace_back(place.key(), blob.data, blob.size, &place.layout());
      } else {
        reasons.push_back(format("the key '{}' has another layout, or describes other blobs", place.key()));
      }
    }
  }
  std::sort(reasons.begin(), reasons.end());
  return changes;
}

} // namespace
} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

std::shared_ptr<Release> Release::open(const std::string& directory, const OpenOptions& options) {
  return std::make_shared<internal::LiveRelease>(directory, options);
}

} // namespace blobstore
