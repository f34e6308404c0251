#include "releases/device.h"

#include <cerrno>
#include <charconv>
#include <cstring>
#include <functional>
#include <string_view>
#include <system_error>

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <blobstore/error.h>

#include "format/constants.h"
#include "format/sha256.h"
#include "os/folders.h"
#include "os/link_tree.h"
#include "os/output_file.h"
#include "os/paths.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// The bytes of a file that is named by their digest. @throws Error FileAccess, Integrity.
std::string read_named(const std::string& path, const std::string& sha256, uint64_t limit) {
  std::string bytes = read_small(path, limit);
  if (const std::string found = internal::sha256(bytes.data(), bytes.size()); found != sha256) {
    throw_error_in(ErrorKind::Integrity, path, "expected the SHA-256 that is its name, found {}", found);
  }
  return bytes;
}

constexpr std::string_view kCurrent = "current";
constexpr std::string_view kNewest = "newest"; // the mark, among the indexes
constexpr uint64_t kMarkLimit = 1 << 10;
constexpr std::string_view kReleases = "releases/";

/// The size of a regular file, if it exists.
std::optional<uint64_t> size_of(const std::string& path) {
  struct stat status;
  if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return std::nullopt;
  }
  return static_cast<uint64_t>(status.st_size);
}

std::optional<uint64_t> number(std::string_view digits) {
  uint64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const std::from_chars_result read = std::from_chars(digits.data(), end, value);
  return read.ec != std::errc() || read.ptr != end || digits.size() > 16 ? std::nullopt : std::optional(value);
}

constexpr size_t kPlaceDigits = 16; // of the name of the folder for what is fetched from one source

/// @throws Error FileAccess: it is still there.
void remove(const std::string& path) {
  remove_all(path);
  struct stat status;
  if (lstat(path.c_str(), &status) == 0) {
    throw_error_in(ErrorKind::FileAccess, path, "it cannot be removed");
  }
}

/// Remove files that are named by a SHA-256, perhaps with an ending, but for some.
void remove_others(const std::string& folder, const std::set<std::string>& wanted, Collected& done) {
  int failed = 0;
  for (const std::string& name : names_in(folder, failed)) {
    const std::string digest = name.substr(0, name.find('.'));
    if (!is_sha256(digest) || wanted.count(digest) > 0) {
      continue;
    }
    const uint64_t size = size_of(folder + name).value_or(0);
    remove(folder + name);
    ++done.files;
    done.nbytes += size;
  }
}

void write_file(const std::string& path, const std::string& bytes) {
  OutputFile output(path, OutputFile::Links::Refuse);
  output.write(bytes.data(), bytes.size());
  output.commit();
}

} // namespace

FetchedFiles::FetchedFiles(const std::string& folder) {
  int failed = 0;
  for (const std::string& name : names_in(folder, failed)) {
    Piece piece;
    piece.path = folder + name;
    const std::optional<uint64_t> size = size_of(piece.path);
    if (!is_sha256(std::string_view(name).substr(0, 64)) || !size) {
      continue;
    }
    piece.size = *size;
    if (name.size() > 64) {
      const std::string_view range = std::string_view(name).substr(65);
      const size_t dash = std::min(range.find('-'), range.size() - 1);
      const std::optional<uint64_t> start = number(range.substr(0, dash));
      const std::optional<uint64_t> last = number(range.substr(dash + 1));
      if (name[64] != '.' || !start || !last || *last < *start) {
        continue;
      }
      piece.start = *start;
      piece.stop = *last + 1;
    }
    pieces_[name.substr(0, 64)].push_back(std::move(piece));
  }
}

std::string FetchedFiles::name(const ReleaseObject& object, uint64_t start, uint64_t stop) {
  return start == 0 && stop == object.size ? object.sha256 : format("{}.{}-{}", object.sha256, start, stop - 1);
}

std::optional<LocalBytes> FetchedFiles::find(const ReleaseObject& object, uint64_t start, uint64_t stop) const {
  const auto found = pieces_.find(object.sha256);
  if (found == pieces_.end()) {
    return std::nullopt;
  }
  for (const Piece& piece : found->second) {
    const bool whole = piece.size == object.size;
    const uint64_t first = whole ? 0 : piece.start;
    const uint64_t end = whole ? object.size : piece.stop.value_or(object.size);
    if (piece.size == end - first && first <= start && stop <= end) {
      return LocalBytes{piece.path, start - first, stop - start};
    }
  }
  return std::nullopt;
}

Installed::Installed(const std::string& directory)
    : folder_(absolute_folder(directory)),
      files_(format("{}files/", folder_)),
      indexes_(format("{}indexes/", folder_)),
      releases_(format("{}{}", folder_, kReleases)) {}

Device::Device(const std::string& directory) : Installed(directory), incoming_(format("{}incoming/", folder_)) {
  const auto make = [](const std::string& path) {
    if (const int failed = make_folder(path); failed != 0) {
      throw Error(ErrorKind::FileAccess, path, std::strerror(failed), failed);
    }
  };
  make(folder_);
  struct stat status;
  if (lstat((folder_ + "signatures").c_str(), &status) == 0 && lstat(indexes_.c_str(), &status) != 0) {
    throw_error_in(ErrorKind::Release, folder_, "releases are published in this folder; use another one");
  }
  lock_ = lock_folder(folder_);
  for (const std::string& path : {files_, indexes_, releases_, incoming_, folder_ + "partial/"}) {
    make(path);
    remove_temporary(path);
  }
  remove_temporary(folder_);
}

std::string Installed::view() const {
  const std::string path = format("{}{}", folder_, kCurrent);
  std::string target = link_target(path);
  struct stat status;
  if (target.empty() && lstat(path.c_str(), &status) != 0 && (errno == ENOENT || errno == ENOTDIR)) {
    return target;
  }
  if (target.substr(0, kReleases.size()) != kReleases || !is_sha256(target.substr(kReleases.size()))) {
    throw_error_in(ErrorKind::InvalidFile, path, "expected a link to a release, found one to '{}'", target);
  }
  return target.substr(kReleases.size());
}

std::string Installed::index_bytes(const std::string& sha256) const {
  return read_named(format("{}{}.json", indexes_, sha256), sha256, kIndexLimit);
}

ReleaseIndex Installed::index(const std::string& sha256) const {
  return read_index(index_bytes(sha256), format("{}{}.json", indexes_, sha256));
}

ReleaseParts Installed::parts(const ReleaseIndex& index) const {
  const std::string list = file(index.parts.sha256);
  return read_parts(read_named(list, index.parts.sha256, kTableLimit), index, list);
}

std::optional<ReleaseMark> Device::mark() const {
  std::optional<ReleaseMark> found;
  const std::string path = format("{}{}", indexes_, kNewest);
  struct stat status;
  if (lstat(path.c_str(), &status) == 0 || errno != ENOENT) {
    const std::string text = read_small(path, kMarkLimit);
    const size_t first = text.find(' ');
    const size_t second = text.find(' ', std::min(first, text.size() - 1) + 1);
    const bool complete = second < text.size() && text.back() == '\n';
    const std::optional<uint64_t> time =
        complete ? number(std::string_view(text).substr(second + 1, text.size() - second - 2)) : std::nullopt;
    if (!time || first == 0 || second == first + 1) {
      throw_error_in(ErrorKind::InvalidFile, path, "expected the name, the version and the time of a release");
    }
    found = ReleaseMark{text.substr(0, first), text.substr(first + 1, second - first - 1), *time};
  }
  if (const std::string current = view(); !current.empty()) {
    ReleaseMark mark = read_mark(index_bytes(current), format("{}{}.json", indexes_, current));
    if (!found || found->published < mark.published) {
      found = std::move(mark);
    }
  }
  return found;
}

bool Device::has(const ReleaseObject& object) const {
  return size_of(file(object.sha256)) == object.size;
}

void Device::check_room(const ReleaseObject& largest, uint64_t needed) const {
  struct statvfs found;
  if (statvfs(files_.c_str(), &found) != 0 || found.f_blocks == 0) { // a file system that does not tell
    return;
  }
  const uint64_t available = static_cast<uint64_t>(found.f_bavail) * found.f_frsize;
  if (needed > available) {
    throw Error(
        ErrorKind::FileAccess,
        file(largest.sha256),
        format(
            "the release needs {} bytes, {} of them for this file, and {} are available",
            needed,
            largest.size,
            available),
        ENOSPC);
  }
}

bool Device::is_complete(const ReleaseIndex& index, const std::string& view) const {
  struct stat status;
  return std::all_of(index.files.begin(), index.files.end(), [&](const ReleaseFile& one) {
    return has(one.object) && lstat(format("{}/{}", release(view), one.name).c_str(), &status) == 0;
  });
}

/// The releases that are here, the newest first, and last those whose index cannot be read.
std::vector<std::string> Device::views() const {
  std::multimap<uint64_t, std::string, std::greater<>> by_time;
  int failed = 0;
  for (const std::string& name : names_in(releases_, failed)) {
    if (is_sha256(name)) {
      uint64_t time = 0;
      try {
        time = index(name).published;
      } catch (const Error&) { // it gives no blobs
      }
      by_time.emplace(time, name);
    }
  }
  std::vector<std::string> found;
  for (const auto& [time, name] : by_time) {
    found.push_back(name);
  }
  return found;
}

const std::map<std::string, LocalBytes>& Device::blobs() {
  if (!blobs_) {
    blobs_.emplace();
    std::set<std::string> seen;
    for (const std::string& view : views()) {
      try {
        add_blobs(view, seen);
      } catch (const Error&) { // what cannot be read is fetched
      }
    }
  }
  return *blobs_;
}

/// Add the contents of a release. @param seen the files whose contents were added.
void Device::add_blobs(const std::string& view, std::set<std::string>& seen) {
  const ReleaseIndex index = this->index(view);
  const ReleaseParts parts = this->parts(index);
  const std::vector<const ReleaseFile*> files = index.distinct();
  for (size_t i = 0; i < files.size(); ++i) {
    const ReleaseObject& object = files[i]->object;
    if (has(object) && seen.insert(object.sha256).second) {
      for (const ReleasePart& part : parts.files[i]) {
        blobs_->emplace(parts.contents[part.content].sha256, LocalBytes{file(object.sha256), part.offset, part.size});
      }
    }
  }
}

void Device::switch_to(const ReleaseIndex& index, const std::string& bytes, const std::string& sha256) const {
  write_file(format("{}{}.json", indexes_, sha256), bytes);
  std::vector<std::pair<std::string, std::string>> links;
  for (const ReleaseFile& one : index.files) {
    std::string up = "../../";
    for (size_t at = one.name.find('/'); at != std::string::npos; at = one.name.find('/', at + 1)) {
      up += "../";
    }
    links.emplace_back(one.name, format("{}files/{}", up, one.object.sha256));
  }
  make_link_tree(releases_, sha256, links);
  // before the switch, because what fails must leave the old release; it can then still be committed again
  write_file(format("{}{}", indexes_, kNewest), format("{} {} {}\n", index.name, index.version, index.published));
  replace_link(folder_, std::string(kCurrent), format("{}{}", kReleases, sha256));
}

void Device::remove_fetched() const {
  int failed = 0;
  for (const std::string& name : names_in(incoming_, failed)) {
    remove_all(incoming_ + name);
  }
}

/// The digests of the objects that a release needs.
std::set<std::string> Device::needed_by(const std::string& view) const {
  const ReleaseIndex index = this->index(view);
  std::set<std::string> found = {index.parts.sha256};
  for (const ReleaseFile& file : index.files) {
    found.insert(file.object.sha256);
  }
  return found;
}

Collected Device::gc(uint64_t keep) const {
  Collected done;
  std::set<std::string> needed;
  std::set<std::string> indexes;
  std::vector<std::pair<std::string, File>> gone; // with their locks
  std::vector<std::string> ordered = {view()};
  for (std::string& name : views()) {
    if (name != ordered.front()) {
      ordered.push_back(std::move(name));
    }
  }
  for (size_t i = 0; i < ordered.size(); ++i) { // before anything is removed, because an index may be damaged
    std::optional<File> lock = i < keep ? std::nullopt : try_lock_folder(release(ordered[i]));
    if (lock) {
      gone.emplace_back(release(ordered[i]), std::move(*lock));
      continue;
    }
    needed.merge(needed_by(ordered[i]));
    indexes.insert(ordered[i]);
    done.in_use += i < keep ? 0 : 1;
  }
  for (const auto& [path, lock] : gone) {
    remove(path);
    ++done.releases;
  }
  remove_others(files_, needed, done);
  remove_others(indexes_, indexes, done);
  int failed = 0;
  for (const std::string& name : names_in(folder_ + "partial/", failed)) { // what pulls of the Python package left
    const std::string place = format("{}partial/{}/", folder_, name);
    if (name.size() != kPlaceDigits || name.find_first_not_of("0123456789abcdef") != std::string::npos) {
      continue;
    }
    if (const std::optional<File> lock = try_lock_folder(place)) {
      remove_others(place + "made/", {}, done);
      remove_others(place, {}, done);
      rmdir((place + "made").c_str());
      rmdir(place.c_str());
    }
  }
  remove_fetched();
  return done;
}

std::string read_small(const std::string& path, uint64_t limit) {
  const File file(path, /*writable=*/false);
  const uint64_t size = file.size();
  if (size > limit) {
    throw_error_in(ErrorKind::InvalidFile, path, "it has more than {} bytes", limit);
  }
  std::string bytes(static_cast<size_t>(size), '\0');
  file.read(bytes.data(), bytes.size(), 0);
  return bytes;
}

std::string sha256_of(const LocalBytes& bytes) {
  Sha256 hash;
  read_pieces(bytes, [&](const uint8_t* data, size_t size) { hash.update(data, size); });
  return hash.finish();
}

bool has_digest(const LocalBytes& bytes, const std::string& sha256) {
  try {
    return sha256_of(bytes) == sha256;
  } catch (const Error&) {
    return false;
  }
}

} // namespace blobstore::internal
