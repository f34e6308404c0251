#include "os/output_file.h"
#include "os/platform.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <blobstore/error.h>

#include "os/paths.h"
#include "os/temporary_files.h"
#include "os/text.h"
#include "os/uninterrupted.h"

namespace blobstore::internal {
namespace {

constexpr size_t kGathered = 1 << 16;
[[maybe_unused]] constexpr uint64_t kAhead = 1 << 23; // bytes after which the system starts to write them to the disk

int sync_descriptor(int descriptor) {
#ifdef __APPLE__
  if (fcntl(descriptor, F_FULLFSYNC) == 0) { // fsync leaves the bytes in the cache of the disk
    return 0;
  }
#endif
  return uninterrupted([&] { return fsync(descriptor); });
}

bool has_no_links(int number) {
  // EACCES: Android forbids links to applications
  return number == EPERM || number == ENOTSUP || number == EOPNOTSUPP || number == ENOSYS || number == EMLINK ||
      number == EINVAL || number == EACCES;
}

bool has_no_folder_sync(int number) {
  return number == EINVAL || number == ENOTSUP || number == EBADF || number == EACCES || number == EPERM ||
      number == EISDIR;
}

/// Whether there is a file, or may be one.
bool exists(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) == 0 || errno != ENOENT;
}

} // namespace

int sync_file(int descriptor) {
  return sync_descriptor(descriptor) == 0 ? 0 : errno;
}

int sync_folder(const std::string& path) {
  const File folder(
      path, uninterrupted([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECTORY); }));
  if (folder.descriptor() >= 0 && sync_descriptor(folder.descriptor()) == 0) {
    return 0;
  }
  return has_no_folder_sync(errno) ? 0 : errno;
}

OutputFile::OutputFile(std::string target, Links links)
    : target_(std::move(target)), place_(links == Links::Follow ? real_path(target_) : target_) {
  remove_abandoned(folder_of(place_));
  backup_ = temporary_in(folder_of(place_));
  gathered_.reserve(kGathered);
  try {
    create();
  } catch (...) {
    unlink(temporary_.c_str());
    throw;
  }
}

OutputFile::~OutputFile() {
  unlink(temporary_.c_str());
  unlink(backup_.c_str());
}

void OutputFile::create() {
  struct stat old;
  const bool replaces = lstat(place_.c_str(), &old) == 0;
  if (!replaces && errno != ENOENT) {
    refuse(errno);
  }
  if (replaces && S_ISLNK(old.st_mode)) {
    throw Error(ErrorKind::FileAccess, target_, "a link is in its place, which is not followed", ELOOP);
  }
  const mode_t mode = replaces ? old.st_mode & 0777 : 0666;
  do { // another process may remove the file before it is locked
    temporary_ = temporary_in(folder_of(place_));
    const int descriptor =
        uninterrupted([&] { return open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode); });
    if (descriptor < 0) {
      refuse(errno);
    }
    file_ = File(target_, descriptor);
  } while (lock_file(file_.descriptor(), /*shared=*/false) == Locked::ByAnother || !exists(temporary_));
  if (replaces) {
    take_over_owner(old.st_uid, old.st_gid, mode);
  }
}

void OutputFile::take_over_owner(uid_t user, gid_t group, mode_t mode) const {
  struct stat status;
  if (fstat(file_.descriptor(), &status) != 0) {
    refuse(errno);
  }
  if (status.st_uid != user || status.st_gid != group) {
    // without the right to do it, the file belongs to this user
    [[maybe_unused]] const int failed = fchown(file_.descriptor(), user, group);
  }
  if (uninterrupted([&] { return fchmod(file_.descriptor(), mode); }) != 0) {
    refuse(errno);
  }
}

void OutputFile::write(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  if (gathered_.size() + size > kGathered) {
    write_out(gathered_.data(), gathered_.size());
    gathered_.clear();
  }
  if (size > kGathered) {
    write_out(bytes, size);
  } else {
    gathered_.insert(gathered_.end(), bytes, bytes + size);
  }
}

void OutputFile::write_out(const uint8_t* data, size_t size) {
  while (size > 0) {
    const ssize_t put = uninterrupted([&] { return ::write(file_.descriptor(), data, size); });
    if (put < 0) {
      refuse(errno);
    }
    data += put;
    size -= static_cast<size_t>(put);
    written_ += static_cast<uint64_t>(put);
  }
#if BLOBSTORE_LINUX && !defined(__ANDROID__)
  if (written_ - started_ >= kAhead) { // so that little is left to wait for at the end; a failure shows there
    sync_file_range(
        file_.descriptor(),
        static_cast<off_t>(started_),
        static_cast<off_t>(written_ - started_),
        SYNC_FILE_RANGE_WRITE);
    started_ = written_;
  }
#endif
}

void OutputFile::make_read_only() {
  struct stat status;
  if (fstat(file_.descriptor(), &status) != 0 || fchmod(file_.descriptor(), status.st_mode & 0444) != 0) {
    refuse(errno);
  }
}

void OutputFile::commit() {
  write_out(gathered_.data(), gathered_.size());
  gathered_.clear();
  if (sync_descriptor(file_.descriptor()) != 0) {
    refuse(errno);
  }
  keep_old();
  if (std::rename(temporary_.c_str(), place_.c_str()) != 0) {
    refuse(errno);
  }
  // Sync the folder before the backup is deleted, so that freeing the old file does not delay the sync.
  if (const int failed = sync_folder(folder_of(place_)); failed != 0) {
    put_back();
    refuse(failed);
  }
}

/// Give the old file, if any, a second name, where the file system has links.
void OutputFile::keep_old() {
  if (!exists(place_)) {
    return;
  }
  had_old_ = true;
  old_ = File(target_, open(place_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  if (old_.descriptor() >= 0) {
    lock_file(old_.descriptor(), /*shared=*/true);
  }
  if (linkat(AT_FDCWD, place_.c_str(), AT_FDCWD, backup_.c_str(), 0) != 0 && !has_no_links(errno)) {
    refuse(errno);
  }
}

/// After an error behind the rename.
void OutputFile::put_back() {
  if (had_old_) {
    std::rename(backup_.c_str(), place_.c_str()); // fails where the file system has no links
  } else if (std::rename(place_.c_str(), temporary_.c_str()) != 0) {
    unlink(place_.c_str()); // a full disk may have no room for the name
  }
}

void OutputFile::refuse(int number) const {
  throw_errno(target_, number);
}

} // namespace blobstore::internal
