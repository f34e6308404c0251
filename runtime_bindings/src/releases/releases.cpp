#include <blobstore/releases.h>

#include <algorithm>
#include <ctime>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <blobstore/error.h>

#include "codec/zstd.h"
#include "format/constants.h"
#include "format/sha256.h"
#include "os/folders.h"
#include "os/link_tree.h"
#include "os/output_file.h"
#include "os/paths.h"
#include "os/text.h"
#include "releases/assembly.h"
#include "releases/device.h"
#include "releases/index.h"
#include "releases/parts.h"
#include "releases/shopping.h"

namespace blobstore BLOBSTORE_API {
namespace internal BLOBSTORE_HIDDEN {
namespace {

constexpr std::string_view kWays = "ways.json.zst"; // beside an index
constexpr uint64_t kDay = 86'400; // in seconds, as the times below
constexpr uint64_t kClockIsSet = 1'767'225'600; // 2026; there are no releases from before
constexpr uint64_t kLatest = 4'102'444'800; // 2100

/// A release on its way into a folder.
class Delivery {
 public:
  Delivery(const std::string& index, const std::string& directory, const ReleaseOptions& options)
      : bytes_(read_small(index, kIndexLimit)), sha256_(sha256(bytes_.data(), bytes_.size())) {
    if (!options.sha256.empty() && options.sha256 != sha256_) {
      throw_error_in(
          ErrorKind::Trust, index, "expected the digest sha256:{}, found sha256:{}", options.sha256, sha256_);
    }
    index_ = read_index(bytes_, index);
    check_identity(index, options);
    device_.emplace(directory);
    index_.check_executorch(options.executorch, index);
    check_successor(index, options);
    fetched_.emplace(device_->incoming());
    list_.path = options.ways.empty() ? index.substr(0, index.rfind('/') + 1).append(kWays) : options.ways;
    list_.required = !options.ways.empty();
    list_.plain = options.plain || zstd_version() == nullptr; // without it, hardly an encoded form can be decoded
  }

  const ReleaseIndex& index() const { return index_; }
  bool is_current() const;
  Missing missing();
  InstalledRelease commit();

 private:
  void check_identity(const std::string& where, const ReleaseOptions& options) const;
  void check_successor(const std::string& where, const ReleaseOptions& options) const;
  std::vector<const ReleaseFile*> wanted() const;
  std::optional<std::string> parts_bytes() const;
  void ask(const ReleaseObject& object, std::vector<Range> ranges, Missing& found) const;
  void make(const ReleaseParts& parts);

  std::string bytes_;
  std::string sha256_;
  ReleaseIndex index_;
  WaysFile list_;
  std::optional<Device> device_;
  std::optional<FetchedFiles> fetched_;
};

bool Delivery::is_current() const {
  if (device_->view() != sha256_) {
    return false;
  }
  try {
    device_->index(sha256_);
  } catch (const Error&) { // the index that is here is damaged
    return false;
  }
  return device_->is_complete(index_, sha256_);
}

void Delivery::check_identity(const std::string& where, const ReleaseOptions& options) const {
  for (const auto& [part, expected, said] :
       {std::tuple("name", options.name, index_.name), std::tuple("version", options.version, index_.version)}) {
    if (!expected.empty() && said != expected) {
      throw_error_in(ErrorKind::Trust, where, "expected the {} '{}', found '{}'", part, expected, said);
    }
  }
}

/// Refuse a release of another name, an older one, or one from the future.
void Delivery::check_successor(const std::string& where, const ReleaseOptions& options) const {
  const uint64_t clock = static_cast<uint64_t>(std::max<int64_t>(std::time(nullptr), 0));
  if (index_.published > (clock >= kClockIsSet ? clock + kDay : kLatest)) {
    throw_error_in(
        ErrorKind::Release,
        where,
        "it was published at {} seconds after 1970, {} seconds ahead of this machine's clock; at most a day is "
        "accepted",
        index_.published,
        index_.published - clock);
  }
  const bool accept_older = options.allow_rollback || device_->view() == sha256_;
  std::optional<ReleaseMark> old;
  try {
    old = device_->mark();
  } catch (const Error& error) {
    if (accept_older) {
      return; // it is about to be mended
    }
    throw_error_in(
        ErrorKind::Trust,
        where,
        "it is unknown whether version {} is newer than the installed one, because its mark or index is damaged "
        "({}); commit that release again, or allow_rollback",
        index_.version,
        error.what());
  }
  if (!old) {
    return;
  }
  if (old->name != index_.name) {
    throw_error_in(
        ErrorKind::Release,
        where,
        "this is a release of '{}', and the folder has releases of '{}'; use another folder",
        index_.name,
        old->name);
  }
  if (index_.published < old->published && !accept_older) {
    throw_error_in(
        ErrorKind::Trust,
        where,
        "version {} is older than version {}, which is or was installed; allow_rollback accepts it",
        index_.version,
        old->version);
  }
}

/// The files that are not here, each content once.
std::vector<const ReleaseFile*> Delivery::wanted() const {
  std::vector<const ReleaseFile*> found;
  for (const ReleaseFile* const file : index_.distinct()) {
    if (!device_->has(file->object)) {
      found.push_back(file);
    }
  }
  return found;
}

/// The list of parts, from the folder or as it was fetched; empty if it is in neither. A damaged one in the folder is
/// fetched again.
std::optional<std::string> Delivery::parts_bytes() const {
  const ReleaseObject& list = index_.parts;
  if (const LocalBytes here{device_->file(list.sha256), 0, list.size};
      device_->has(list) && has_digest(here, list.sha256)) {
    return read_small(here.path, kTableLimit);
  }
  const std::optional<LocalBytes> place = fetched_->find(list, 0, list.size);
  if (!place) {
    return std::nullopt;
  }
  std::string bytes = read_small(place->path, kTableLimit);
  if (sha256(bytes.data(), bytes.size()) != list.sha256) {
    remove_all(place->path);
    throw_error_in(ErrorKind::Integrity, place->path, "this is not the list of the parts; fetch it again");
  }
  return bytes;
}

/// List ranges of an object, near ones as one, unless they were fetched.
void Delivery::ask(const ReleaseObject& object, std::vector<Range> ranges, Missing& found) const {
  std::sort(ranges.begin(), ranges.end());
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (range.first == range.second) {
      continue;
    }
    if (!merged.empty() && range.first <= merged.back().second + kMostGap) {
      merged.back().second = std::max(merged.back().second, range.second);
    } else {
      merged.push_back(range);
    }
  }
  for (const auto& [start, stop] : merged) {
    if (!fetched_->find(object, start, stop)) {
      const bool all = start == 0 && stop == object.size;
      found.fetches.push_back(
          {object.path(),
           all ? std::string() : format("bytes={}-{}", start, stop - 1),
           stop - start,
           object.sha256,
           FetchedFiles::name(object, start, stop)});
      found.bytes += stop - start;
    }
  }
}

Missing Delivery::missing() {
  Missing found;
  found.name = index_.name;
  found.version = index_.version;
  found.sha256 = sha256_;
  found.release_bytes = index_.size();
  found.folder = device_->incoming();
  found.current = is_current();
  if (found.current) {
    return found;
  }
  const std::vector<const ReleaseFile*> files = wanted();
  const std::optional<std::string> bytes = parts_bytes();
  if (!bytes) { // it says what else is needed
    ask(index_.parts, {{0, index_.parts.size}}, found);
    return found;
  }
  const ReleaseParts parts = read_parts(*bytes, index_, index_.parts.sha256);
  const Shopping plan(*device_, *fetched_, index_, sha256_, parts, files, list_, /*verify=*/true);
  for (const auto& [sha256, asked] : plan.asked()) {
    ask(asked.object, asked.ranges, found);
  }
  return found;
}

/// Make the files that are missing.
void Delivery::make(const ReleaseParts& parts) {
  for (const bool verify :
       {false, true}) { // comparing what is here takes time; so it is only done if something is wrong
    try {
      const Shopping plan(*device_, *fetched_, index_, sha256_, parts, wanted(), list_, verify);
      Assembly(*device_, *fetched_, plan, verify).make_all();
      return;
    } catch (const DamagedHere&) {
    }
  }
}

InstalledRelease Delivery::commit() {
  InstalledRelease done{
      index_.name, index_.version, sha256_, device_->release(sha256_), device_->view() != sha256_, index_.size()};
  if (is_current()) {
    device_->remove_fetched(); // what a process left that was killed when it had switched
    return done;
  }
  const std::optional<std::string> bytes = parts_bytes();
  if (!bytes) {
    throw_error_in(
        ErrorKind::Transfer,
        device_->incoming(),
        "the list of the parts, {}, was not fetched; `missing` says what else",
        index_.parts.sha256);
  }
  make(read_parts(*bytes, index_, index_.parts.sha256));
  OutputFile output(device_->file(index_.parts.sha256), OutputFile::Links::Refuse);
  output.write(bytes->data(), bytes->size());
  output.commit();
  device_->switch_to(index_, bytes_, sha256_);
  device_->remove_fetched();
  return done;
}

/// The URL of the release folder with an index; it ends with a slash.
std::string release_folder_of(const std::string& url) {
  const size_t scheme = url.find("://");
  const size_t path = scheme == std::string::npos ? 0 : url.find('/', scheme + 3); // the server is no part of it
  size_t end = ends_with(url, "/index.json") ? url.size() : std::string::npos;
  for (int part = 0; part < 3 && end != std::string::npos; ++part) { // index.json, version, name
    end = end == 0 ? std::string::npos : url.rfind('/', end - 1);
  }
  if (end == std::string::npos || end < path) {
    throw_error_in(ErrorKind::Input, url, "this is not the URL of an index in a release folder");
  }
  return url.substr(0, end + 1);
}

InstalledRelease pull_by(
    const std::string& url, const std::string& directory, const Download& download, const ReleaseOptions& options) {
  const std::string server = release_folder_of(url);
  const std::string folder = Device(directory).incoming();
  const std::string index = folder + "index.json";
  download(url, "", index);
  std::string ways; // not beside the index: "latest" may be another release by now
  {
    Delivery delivery(index, directory, options); // nobody else has the folder while this lives
    if (delivery.is_current()) {
      return delivery.commit();
    }
    ways = format("{}{}/{}/{}", server, delivery.index().name, delivery.index().version, kWays);
  }
  if (options.ways.empty() && !options.plain) {
    download(ways, "", folder + std::string(kWays));
  }
  for (int round = 0; round < 2; ++round) { // the list of parts, and what it names
    const Missing todo = Delivery(index, directory, options).missing();
    for (const Fetch& one : todo.fetches) {
      download(server + one.url, one.range, todo.folder + one.file);
    }
  }
  return Delivery(index, directory, options).commit();
}

Collected collect(const std::string& directory, uint64_t keep) {
  if (keep == 0) {
    throw_error(ErrorKind::Release, "at least one release must be kept, not 0");
  }
  const std::string folder = absolute_folder(directory);
  if (link_target(format("{}current", folder)).empty()) { // before the folder would be made
    throw_error_in(ErrorKind::Release, folder, "no release is installed here");
  }
  return Device(directory).gc(keep);
}

} // namespace
} // namespace internal BLOBSTORE_HIDDEN

Missing missing(const std::string& index, const std::string& directory, const ReleaseOptions& options) {
  return internal::Delivery(index, directory, options).missing();
}

InstalledRelease commit(const std::string& index, const std::string& directory, const ReleaseOptions& options) {
  return internal::Delivery(index, directory, options).commit();
}

InstalledRelease pull(
    const std::string& url, const std::string& directory, const Download& download, const ReleaseOptions& options) {
  return internal::pull_by(url, directory, download, options);
}

Collected gc(const std::string& directory, uint64_t keep) {
  return internal::collect(directory, keep);
}

} // namespace blobstore
