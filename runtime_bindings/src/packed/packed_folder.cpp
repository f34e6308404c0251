#include "packed/packed_folder.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <executorch/runtime/platform/log.h>

#include "cache/mapped_cache.h"
#include "format/text_hash.h"
#include "os/folders.h"
#include "os/random.h"
#include "os/system_text.h"
#include "os/temporary_files.h"
#include "os/text.h"
#include "packed/packed_copy.h"

namespace blobstore::internal {
namespace {

constexpr char kEnding[] = ".packed";
constexpr char kMarkEnding[] = ".packed.used"; // beside a file: when it was used, and as what it was verified
constexpr size_t kNameSize = 32 + 1 + 16 + 1 + 16 + 1 + 16 + 7; // of a file, at most; see name_of
constexpr char kLock[] = "building.lock";
constexpr auto kPatience = std::chrono::seconds(60);
constexpr auto kPause = std::chrono::milliseconds(5);

std::string short_text(const Digest& digest) {
  return to_string(digest).substr(0, 16);
}

/// The name of a file begins with whose weights it has...
std::string owner_of(const PackedPurpose& purpose) {
  const std::string foundation = to_string(purpose.foundation);
  return purpose.program ? format("{}-{}-", foundation, short_text(*purpose.program)) : foundation + "-";
}

/// ... and which code packed them.
std::string prefix_of(const PackedPurpose& purpose) {
  return format("{}{}-", owner_of(purpose), short_text(purpose.runtime));
}

/// It ends with a random number, because ExecuTorch remembers in each process what it read from a path. So a file that
/// replaces a damaged one is read.
std::string name_of(const PackedPurpose& purpose) {
  return format("{}{}{}", prefix_of(purpose), random_digits(16), kEnding);
}

/// What a mark says about the file beside it: a file that has this status is the one that was verified.
std::string mark_of(const FileStatus& status) {
  return format("{} {} {} {} {}\n", status.device, status.inode, status.size, status.modified, status.changed);
}

std::string mark_path(const std::string& path) {
  return path + (kMarkEnding + std::strlen(kEnding));
}

/// Closed, with errno, if it cannot be opened.
File open_to_read(const std::string& path) {
  return File(path, open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
}

bool is_marked(const std::string& path, const std::string& mark) {
  const File file = open_to_read(path);
  std::string found(mark.size() + 1, '\0');
  return file.is_open() &&
      pread(file.descriptor(), found.data(), found.size(), 0) == static_cast<ssize_t>(mark.size()) &&
      found.compare(0, mark.size(), mark) == 0;
}

/// Without the right to write, the file is verified again next time.
void write_mark(const std::string& path, const std::string& mark) {
  const File file(path, open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666));
  [[maybe_unused]] const ssize_t written = file.is_open() ? ::write(file.descriptor(), mark.data(), mark.size()) : 0;
}

void touch(const std::string& path) {
  utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
}

bool is_at(const File& file, const std::string& path) {
  struct stat there;
  const FileStatus here = file.status();
  return lstat(path.c_str(), &there) == 0 && static_cast<uint64_t>(there.st_ino) == here.inode &&
      static_cast<uint64_t>(there.st_dev) == here.device;
}

/// Names in a folder; none if it cannot be read. @throws Error FileAccess, if asked to.
std::vector<std::string> names_of(const std::string& folder, bool must_exist = false) {
  int failed = 0;
  std::vector<std::string> names = names_in(folder, failed);
  if (must_exist && failed != 0 && failed != ENOENT) {
    throw_errno(folder, failed);
  }
  return names;
}

void remove_file(const std::string& path) {
  unlink(path.c_str());
  unlink(mark_path(path).c_str());
}

/// Remove a file that no living process uses. @returns whether it is gone.
bool remove_if_unused(const std::string& path) {
  const File file = open_to_read(path);
  if (!file.is_open()) {
    return errno == ENOENT;
  }
  if (lock_file(file.descriptor(), /*shared=*/false) == Locked::ByAnother) {
    return false;
  }
  if (is_at(file, path)) {
    remove_file(path); // a process that waits for the lock will see that the file is gone
  }
  return true;
}

/// The files that processes have locked, as the system lists them: their numbers. Trying to lock a file would not do:
/// an ExecuTorch that starts at that moment would neither load it nor, as root, leave it as it is.
std::vector<uint64_t> locked_files() {
  std::vector<uint64_t> inodes;
  const std::string text = system_text("/proc/locks"); // "3: FLOCK  ADVISORY  READ  912 fe:00:2277861 0 EOF"
  for (size_t at = text.find("FLOCK"); at != std::string::npos; at = text.find("FLOCK", at + 1)) {
    const size_t inode = text.find(':', text.find(':', at) + 1);
    if (inode != std::string::npos) {
      inodes.push_back(std::strtoull(text.c_str() + inode + 1, nullptr, 10));
    }
  }
  return inodes;
}

} // namespace

Digest identity_of(const MappedCache& cache) {
  Hasher hasher;
  const std::string& id = cache.placed().sources()[0].table.metadata.at(kWorkingCopyKey);
  hasher.update(id.data(), id.size());
  const FileStatus status = cache.shared_file().status(); // a copy of the copy is another one
  hasher.update(&status.device, sizeof status.device);
  hasher.update(&status.inode, sizeof status.inode);
  for (const auto& slot : cache.placed().slots()) {
    hasher.update(slot->key.data(), slot->key.size() + 1);
    hasher.update(&slot->size, sizeof slot->size);
  }
  return hasher.digest();
}

PackedFolder::PackedFolder(std::string folder, const PackedOptions& options)
    : folder_(std::move(folder)), options_(options) {
  enter();
}

std::shared_ptr<const PackedLease> PackedFolder::find(const PackedPurpose& purpose) {
  for (const std::string& name : newest_first(prefix_of(purpose))) {
    if (auto found = lease(folder_ + name)) {
      return found;
    }
  }
  return nullptr;
}

/// The names of files for a purpose, in the order in which they are used: a file that replaces another one is newer,
/// and mostly has more entries.
std::vector<std::string> PackedFolder::newest_first(const std::string& prefix) const {
  std::vector<std::tuple<int64_t, int64_t, std::string>> found;
  for (std::string& name : names_of(folder_)) {
    struct stat status;
    if (name.compare(0, prefix.size(), prefix) == 0 && ends_with(name, kEnding) &&
        lstat((folder_ + name).c_str(), &status) == 0 && S_ISREG(status.st_mode)) {
      found.emplace_back(status.st_mtime, status.st_size, std::move(name));
    }
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> names;
  for (auto& each : found) {
    names.push_back(std::move(std::get<2>(each)));
  }
  return names;
}

/// A stock process of root keeps the file locked as long as it runs. It only reads, so a working copy is followed all
/// the same.
std::shared_ptr<const PackedLease> PackedFolder::lease(const std::string& path, bool to_follow) {
  const std::lock_guard<std::mutex> guard(mutex_);
  std::weak_ptr<const PackedLease>& known = leases_[path];
  std::shared_ptr<const PackedLease> found = known.lock();
  if (found != nullptr && is_at(found->file(), path) && !options_.verify) {
    touch(mark_path(path));
    return found;
  }
  try {
    File file = open_to_read(path);
    if (!file.is_open()) {
      throw_errno(path, errno);
    }
    const bool locked = lock_file(file.descriptor(), /*shared=*/true) != Locked::ByAnother;
    if (!locked && !to_follow) {
      ++reasons_["another program has locked the file"];
      return nullptr;
    }
    if (!is_at(file, path)) {
      return nullptr; // it was removed before it was locked
    }
    if (!file.is_as_safe_as(File(folder_, ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)))) {
      ++reasons_["the file belongs to another user, or others may write to it"];
      return nullptr;
    }
    const FileStatus status = file.status();
    const Mapping map(file, 0, status.size, Mapping::Kind::ReadOnly);
    PackedTable table = read_packed_table(path, map.data(), status.size);
    const std::string mark = mark_of(status);
    if (options_.verify || !is_marked(mark_path(path), mark)) {
      verified_bytes_ += verify_packed(path, map.data(), table).bytes;
      write_mark(mark_path(path), mark);
    } else {
      touch(mark_path(path));
    }
    if (found != nullptr && is_at(found->file(), path)) {
      return found;
    }
    found = std::make_shared<PackedLease>(std::move(file), status.size, std::move(table));
    if (locked) { // so it may be used for loading
      known = found;
    }
    return found;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::FileAccess) {
      ++reasons_["the file cannot be read: " + error.reason()];
    } else {
      ++dropped_;
      ++reasons_["the file was damaged: " + error.reason()];
      remove_file(path);
    }
    return nullptr;
  }
}

PackedFolder::Building PackedFolder::begin_build() const {
  if (folder_.size() + kNameSize > kMostPath) {
    throw Error(
        ErrorKind::FileAccess, folder_, format("ExecuTorch takes paths of up to {} bytes", kMostPath), ENAMETOOLONG);
  }
  const int failed = make_folder(folder_);
  const std::string path = folder_ + kLock;
  File file(path, ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!file.is_open()) {
    throw_errno(folder_, failed != 0 ? failed : errno);
  }
  const auto begin = std::chrono::steady_clock::now();
  while (lock_file(file.descriptor(), /*shared=*/false) == Locked::ByAnother) {
    if (std::chrono::steady_clock::now() - begin > kPatience) {
      throw Error(ErrorKind::FileAccess, folder_, "another process has been building a file for a minute", EAGAIN);
    }
    std::this_thread::sleep_for(kPause);
  }
  remove_abandoned(folder_);
  return Building(std::move(file));
}

/// What goes to a file: the first entry of each name. Does not own the bytes.
class PackedFolder::Gathered {
 public:
  PackedContents contents;
  PackedKeys keys;

  /// @param map encoded; empty for none.
  void take(PackedEntry entry, const uint8_t* data, const std::string& map) {
    if (!names_.insert(entry.name).second) {
      return;
    }
    entry.map = 0;
    if (!map.empty()) {
      const auto [numbered, fresh] = maps_.emplace(map, static_cast<uint32_t>(maps_.size() + 1));
      if (fresh) {
        contents.maps.push_back(map);
      }
      entry.map = numbered->second;
    }
    const uint8_t* bytes = data + entry.offset;
    contents.entries.push_back({std::move(entry), bytes});
  }

  /// Take what an older file has, which other programs go on using. @param data the file.
  void take_all(const std::string& path, const uint8_t* data, uint64_t size) {
    PackedTable table = read_packed_table(path, data, size);
    for (PackedEntry& entry : table.entries) {
      if (entry.name == kPackedState) {
        continue; // what its entries are made of may change while they are copied; they are made anew
      }
      if (entry.name == kPackedKeys) {
        keys.merge(decode_keys(path, data + entry.offset, entry.size));
        continue;
      }
      const std::string map = entry.map == 0 ? std::string() : table.maps[entry.map - 1].encode();
      take(std::move(entry), data, map);
    }
    contents.covers.merge(table.covers);
  }

 private:
  std::unordered_set<std::string, TextHash> names_;
  std::map<std::string, uint32_t> maps_;
};

void PackedFolder::add(const PackedPurpose& purpose, const ScratchFile& packed, PackedMade made) {
  StockPacked fresh(packed);
  Gathered gathered;
  gathered.contents.covers = std::move(made.covers);
  gathered.keys = std::move(made.keys);
  // XNNPACK packs in the order of execution, in which a pass reads the file from its beginning to its end
  std::sort(fresh.entries.begin(), fresh.entries.end(), [](const PackedEntry& a, const PackedEntry& b) {
    return std::tie(a.offset, a.name) < std::tie(b.offset, b.name);
  });
  for (PackedEntry& entry : fresh.entries) {
    if (purpose.changes ? gathered.keys.count(entry.name) != 0 : made.wanted(entry.name)) {
      const auto of_entry = made.maps.find(entry.name);
      gathered.take(std::move(entry), fresh.map.data(), of_entry == made.maps.end() ? std::string() : of_entry->second);
    }
  }
  std::shared_ptr<const PackedLease> older = find(purpose);
  Mapping older_map;
  if (older != nullptr) {
    older_map = Mapping(older->file(), 0, older->size(), Mapping::Kind::ReadOnly);
    const Gathered own = gathered;
    gathered.take_all(older->path(), older_map.data(), older->size());
    if (packed_size(gathered.contents) > options_.limit) { // such as entries of a working copy that was made anew
      gathered = own;
    }
  }
  const std::string path = write(purpose, gathered);
  older.reset(); // unless a program uses it, it goes
  older_map = Mapping(); // a map of an open file holds its lock, too
  remove_replaced(purpose, path);
}

/// @returns the path of the new file.
std::string PackedFolder::write(const PackedPurpose& purpose, Gathered& gathered) {
  PackedContents& contents = gathered.contents;
  std::string keys;
  std::vector<uint8_t> state;
  if (purpose.changes) {
    keys = encode_keys(gathered.keys);
    state.resize(state_size(gathered.keys));
    contents.entries.push_back({{kPackedKeys, 0, keys.size()}, reinterpret_cast<const uint8_t*>(keys.data())});
    contents.entries.push_back({{kPackedState, 0, state.size()}, state.data()});
  }
  const uint64_t needed = packed_size(contents);
  if (needed > options_.limit) {
    throw_error_in(
        ErrorKind::Unsupported,
        folder_,
        "a file of {} bytes is needed, the limit of the store is {}",
        needed,
        options_.limit);
  }
  make_room(options_.limit - needed, nullptr);
  std::string path = folder_ + name_of(purpose);
  write_packed(path, contents);
  ++builds_;
  return path;
}

/// Remove the files that a new one stands for, also those of other versions of XNNPACK.
void PackedFolder::remove_replaced(const PackedPurpose& purpose, const std::string& path) const {
  const std::string owner = owner_of(purpose);
  for (const std::string& name : names_of(folder_)) {
    if (name.size() == path.size() - folder_.size() && name.compare(0, owner.size(), owner) == 0 &&
        ends_with(name, kEnding) && folder_ + name != path) {
      remove_if_unused(folder_ + name);
    }
  }
}

std::shared_ptr<PackedCopy> PackedFolder::copy_of(
    const MappedCache& cache, const std::shared_ptr<const PackedLease>& lease) {
  std::shared_ptr<PackedCopy> copy;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::weak_ptr<PackedCopy>& known = copies_[{cache.id(), lease->path()}];
    copy = known.lock();
    if (copy != nullptr) {
      return copy;
    }
    try {
      copy = std::make_shared<PackedCopy>(
          cache, lease, std::shared_ptr<std::atomic<uint64_t>>(shared_from_this(), &written_));
    } catch (const Error& error) {
      ++reasons_["the file cannot follow its working copy: " + error.reason()];
      return nullptr;
    }
    known = copy;
  }
  cache.follow(copy);
  return copy;
}

std::vector<std::shared_ptr<CommitFollower>> PackedFolder::copies_of(const MappedCache& cache) {
  std::vector<std::shared_ptr<CommitFollower>> copies;
  for (const std::string& name : newest_first(to_string(identity_of(cache)) + "-")) {
    if (const auto found = lease(folder_ + name, /*to_follow=*/true)) {
      if (auto copy = copy_of(cache, found)) {
        copies.push_back(std::move(copy));
      }
    }
  }
  return copies;
}

void PackedFolder::note_fallback(const std::string& reason, std::optional<uint64_t> heap) {
  const std::lock_guard<std::mutex> guard(mutex_);
  ++reasons_[reason];
  ++fallbacks_;
  if (heap) {
    heap_bytes_ = heap_bytes_.value_or(0) + *heap;
  }
}

void PackedFolder::note_unmapped() {
  static constexpr char kReason[] = "this ExecuTorch keeps no packed weights in files, as version 1.5 does";
  static std::once_flag warned;
  std::call_once(warned, [] { ET_LOG(Error, "blobstore: weights are packed on the heap: %s", &kReason[0]); });
  note_fallback(kReason, std::nullopt);
}

PackedStats PackedFolder::stats() const {
  PackedStats stats;
  stats.hits = hits_;
  stats.builds = builds_;
  stats.written = written_;
  stats.repacked = repacked_;
  stats.dropped = dropped_;
  stats.verified_bytes = verified_bytes_;
  const std::lock_guard<std::mutex> guard(mutex_);
  stats.reasons.assign(reasons_.begin(), reasons_.end());
  stats.heap_bytes = heap_bytes_;
  stats.fallbacks = fallbacks_;
  for (const auto& [path, weak] : leases_) {
    const auto lease = weak.lock();
    stats.mapped_bytes += lease != nullptr ? lease->size() : 0;
  }
  return stats;
}

std::vector<PackedFile> PackedFolder::list() const {
  return look(/*compare=*/false);
}

std::vector<PackedFile> PackedFolder::verify() const {
  return look(/*compare=*/true);
}

std::vector<PackedFile> PackedFolder::look(bool compare) const {
  std::vector<PackedFile> files;
  const std::vector<uint64_t> locked = locked_files();
  for (const std::string& name : names_of(folder_, /*must_exist=*/true)) {
    struct stat status;
    PackedFile about;
    about.path = folder_ + name;
    if (!ends_with(name, kEnding) || lstat(about.path.c_str(), &status) != 0) {
      continue; // or it was removed meanwhile
    }
    about.size = static_cast<uint64_t>(status.st_size);
    about.used = status.st_mtime;
    struct stat mark;
    if (lstat(mark_path(about.path).c_str(), &mark) == 0) {
      about.used = std::max<int64_t>(about.used, mark.st_mtime);
    }
    try {
      const File file(about.path, /*writable=*/false);
      const Mapping map(file, 0, about.size, Mapping::Kind::ReadOnly);
      const PackedTable table = read_packed_table(about.path, map.data(), about.size);
      about.entries = table.entries.size();
      for (const PackedEntry& entry : table.entries) {
        about.mapped += entry.map != 0 ? 1 : 0;
      }
      if (compare) {
        about.unchecked = verify_packed(about.path, map.data(), table).unchecked;
      }
    } catch (const Error& error) {
      about.problem = error.reason();
    }
    about.in_use = std::count(locked.begin(), locked.end(), static_cast<uint64_t>(status.st_ino)) != 0;
    files.push_back(std::move(about));
  }
  std::sort(files.begin(), files.end(), [](const PackedFile& a, const PackedFile& b) {
    return std::tie(b.used, a.path) < std::tie(a.used, b.path);
  });
  return files;
}

std::vector<PackedFile> PackedFolder::gc() const {
  std::vector<PackedFile> removed;
  if (access(folder_.c_str(), F_OK) != 0) {
    return removed;
  }
  const Building building = begin_build();
  std::set<std::string> purposes;
  std::map<std::string, PackedFile> files; // by name
  for (PackedFile& file : look(/*compare=*/false)) {
    files.emplace(file.path.substr(folder_.size()), std::move(file));
  }
  for (const std::string& name : newest_first(/*prefix=*/"")) {
    const auto file = files.find(name);
    if (file == files.end()) {
      continue; // it appeared meanwhile
    }
    const bool damaged = !file->second.problem.empty();
    const bool replaced = !damaged && !purposes.insert(name.substr(0, name.rfind('-') + 1)).second;
    if ((replaced || damaged) && remove_if_unused(file->second.path)) {
      removed.push_back(std::move(file->second));
    }
  }
  make_room(options_.limit, &removed);
  for (const std::string& name : names_of(folder_)) { // marks of files that are gone
    if (ends_with(name, kMarkEnding)) {
      const std::string mark = folder_ + name;
      if (access(mark.substr(0, mark.size() - std::strlen(".used")).c_str(), F_OK) != 0) {
        unlink(mark.c_str());
      }
    }
  }
  return removed;
}

/// Remove unused files, the least recently used first, until the others fit.
void PackedFolder::make_room(uint64_t limit, std::vector<PackedFile>* removed) const {
  std::vector<PackedFile> files = look(/*compare=*/false);
  uint64_t total = 0;
  for (const PackedFile& file : files) {
    total += file.size;
  }
  for (auto file = files.rbegin(); file != files.rend() && total > limit; ++file) {
    if (remove_if_unused(file->path)) {
      total -= file->size;
      if (removed != nullptr) {
        removed->push_back(std::move(*file));
      }
    }
  }
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

std::shared_ptr<PackedStore> PackedStore::open(const std::string& folder, const PackedOptions& options) {
  if constexpr (!internal::kPackedStores) {
    throw Error(
        ErrorKind::Unsupported, folder, "this library has no packed stores: it was built with BLOBSTORE_MINIMAL");
  }
  struct stat status;
  if (folder.empty() || (stat(folder.c_str(), &status) == 0 && !S_ISDIR(status.st_mode))) {
    throw Error(ErrorKind::FileAccess, folder, "not a folder", ENOTDIR);
  }
  return std::make_shared<internal::PackedFolder>(internal::absolute_folder(folder), options);
}

} // namespace blobstore
