#include "os/file.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <blobstore/error.h>

#include "os/text.h"
#include "os/uninterrupted.h"

namespace blobstore::internal {
namespace {

int64_t nanoseconds(const timespec& time) {
  return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

/// While it lives, a lock is waited for; it says so on standard error, unless that ends soon. Anyone who may read a
/// file can hold its lock.
class WaitingNotice {
 public:
  explicit WaitingNotice(const std::string& path) {
    try {
      thread_ = std::thread([this, path] {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto soon =
            std::chrono::system_clock::now() + std::chrono::seconds(1); // glibc 2.28 has no other clock here
        if (!changed_.wait_until(lock, soon, [this] { return ended_; })) {
          std::fprintf(stderr, "blobstore: %s: waiting for another process, which has locked it\n", path.c_str());
        }
      });
    } catch (const std::system_error&) { // there are too many threads; it waits without a word
    }
  }
  ~WaitingNotice() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) {
      thread_.join();
    }
  }
  WaitingNotice(const WaitingNotice&) = delete;
  WaitingNotice& operator=(const WaitingNotice&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::thread thread_;
};

} // namespace

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

File::File(std::string path, bool writable) : path_(std::move(path)) {
  descriptor_ = open(path_.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    throw_errno(path_, errno);
  }
  struct stat status;
  const int failed = fstat(descriptor_, &status) == 0 ? 0 : errno;
  if (failed != 0 || !S_ISREG(status.st_mode)) {
    close(descriptor_);
    descriptor_ = -1;
    if (failed != 0 || S_ISDIR(status.st_mode)) {
      throw_errno(path_, failed != 0 ? failed : EISDIR);
    }
    throw Error(ErrorKind::FileAccess, path_, "not a regular file", EINVAL);
  }
}

File::~File() {
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

File File::open_if_there(std::string path) {
  const int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
  // ENXIO is what a socket answers
  if (descriptor < 0 && errno != ENOENT && errno != ELOOP && errno != ENXIO && errno != EISDIR) {
    throw_errno(path, errno);
  }
  File file(std::move(path), descriptor);
  struct stat status;
  if (file.is_open() && fstat(descriptor, &status) != 0) {
    throw_errno(file.path(), errno);
  }
  if (file.is_open() && !S_ISREG(status.st_mode)) {
    return File(file.path(), -1);
  }
  return file;
}

bool File::is_as_safe_as(const File& that) const {
  constexpr uint32_t kGroup = 020;
  constexpr uint32_t kOthers = 002;
  constexpr uint32_t kSticky = 01000; // of a folder in which users cannot replace files of others
  const FileStatus mine = status();
  const FileStatus other = that.status();
  const bool sticky = (other.mode & kSticky) != 0;
  if ((other.mode & kOthers) != 0 && !sticky) {
    return true;
  }
  const bool shared_group = (other.mode & kGroup) != 0 && !sticky && mine.group == other.group;
  const bool own = mine.user == 0 || mine.user == other.user || mine.user == geteuid();
  return (own || shared_group) && (mine.mode & kOthers) == 0 && ((mine.mode & kGroup) == 0 || shared_group);
}

FileStatus File::status() const {
  struct stat status;
  if (fstat(descriptor_, &status) != 0) {
    throw_errno(path_, errno);
  }
  return {
      static_cast<uint64_t>(status.st_dev),
      static_cast<uint64_t>(status.st_ino),
      static_cast<uint64_t>(status.st_size),
      static_cast<uint64_t>(status.st_blocks) * 512,
      static_cast<uint32_t>(status.st_mode & 07777),
      static_cast<uint32_t>(status.st_uid),
      static_cast<uint32_t>(status.st_gid),
#ifdef __APPLE__
      nanoseconds(status.st_mtimespec),
      nanoseconds(status.st_ctimespec)};
#else
      nanoseconds(status.st_mtim),
      nanoseconds(status.st_ctim)};
#endif
}

bool File::is_same(const File& that) const {
  if (!is_open() || !that.is_open()) {
    return false;
  }
  const FileStatus one = status();
  const FileStatus other = that.status();
  return one.device == other.device && one.inode == other.inode;
}

void File::check_length(uint64_t end) const {
  if (const uint64_t found = size(); found < end) {
    throw Error(
        ErrorKind::FileAccess,
        path_,
        format("the file was truncated: it has {} bytes, {} are expected", found, end),
        EIO);
  }
}

void File::truncate(uint64_t size) const {
  if (ftruncate(descriptor_, static_cast<off_t>(size)) != 0) {
    throw_errno(path_, errno);
  }
}

void File::set_mode(uint32_t mode) const {
  if (fchmod(descriptor_, static_cast<mode_t>(mode)) != 0) {
    throw_errno(path_, errno);
  }
}

void File::lock(bool exclusive) const {
  const int operation = exclusive ? LOCK_EX : LOCK_SH;
  const auto take = [&](int flags) { return uninterrupted([&] { return flock(descriptor_, operation | flags); }); };
  int failed = take(LOCK_NB);
  if (failed != 0 && errno == EWOULDBLOCK) {
    const WaitingNotice notice(path_);
    failed = take(0);
  }
  if (failed != 0) {
    throw Error(ErrorKind::FileAccess, path_, format("cannot lock: {}", std::strerror(errno)), errno);
  }
}

void File::unlock() const noexcept {
  flock(descriptor_, LOCK_UN);
}

void File::reserve(uint64_t offset, uint64_t size) const {
#if BLOBSTORE_LINUX
  const auto allocate = [&] { return fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(size)); };
  if (uninterrupted(allocate) == 0) {
    return;
  }
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    throw_errno(path_, errno);
  }
#endif
  // existing bytes are written once more, because there may be holes among them
  std::vector<uint8_t> piece(std::min<uint64_t>(size, 1 << 20));
  for (const uint64_t end = offset + size; offset < end;) {
    const uint64_t now = std::min<uint64_t>(piece.size(), end - offset);
    const uint64_t length = this->size();
    const uint64_t there = std::min(now, length - std::min(length, offset));
    read(piece.data(), there, offset);
    std::fill(piece.begin() + static_cast<std::ptrdiff_t>(there), piece.end(), 0);
    write(piece.data(), now, offset);
    offset += now;
  }
}

File File::reopen() const {
  return reopen_with(fcntl(descriptor_, F_GETFL) & O_ACCMODE);
}

File File::reopen_to_write() const {
  try {
    return reopen_with(O_RDWR);
  } catch (const Error& error) {
    const uint32_t mode = status().mode;
    if (error.number() != EACCES || fchmod(descriptor_, mode | S_IWUSR) != 0) {
      throw;
    }
    File file;
    try {
      file = reopen_with(O_RDWR);
    } catch (const Error&) { // it is thrown below
    }
    fchmod(descriptor_, mode);
    if (!file.is_open()) {
      throw;
    }
    return file;
  }
}

File File::reopen_with(int access) const {
#if BLOBSTORE_LINUX
  // by descriptor, because the path may lead to another file by now
  const std::string link = format("/proc/self/fd/{}", descriptor_);
  const int descriptor = open(link.c_str(), access | O_CLOEXEC);
#else
  const int descriptor = open(path_.c_str(), access | O_CLOEXEC | O_NONBLOCK);
#endif
  if (descriptor < 0) {
    throw_errno(path_, errno);
  }
  File file(path_, descriptor);
#if !BLOBSTORE_LINUX
  const FileStatus before = status();
  const FileStatus now = file.status();
  if (now.device != before.device || now.inode != before.inode) {
    throw Error(ErrorKind::FileAccess, path_, "it was replaced by another file while it was open", EIO);
  }
#endif
  return file;
}

void File::read(void* buffer, size_t size, uint64_t offset) const {
  auto* to = static_cast<uint8_t*>(buffer);
  while (size > 0) {
    const ssize_t got = uninterrupted([&] { return pread(descriptor_, to, size, static_cast<off_t>(offset)); });
    if (got < 0) {
      throw_errno(path_, errno);
    }
    if (got == 0) {
      throw Error(ErrorKind::FileAccess, path_, format("it was truncated: no byte at {}", offset), EIO);
    }
    to += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

void File::write(const void* buffer, size_t size, uint64_t offset) const {
  const auto* from = static_cast<const uint8_t*>(buffer);
  while (size > 0) {
    const ssize_t put = uninterrupted([&] { return pwrite(descriptor_, from, size, static_cast<off_t>(offset)); });
    if (put < 0) {
      throw_errno(path_, errno);
    }
    from += put;
    offset += static_cast<uint64_t>(put);
    size -= static_cast<size_t>(put);
  }
}

TemporaryFile::TemporaryFile(const std::string& path)
    : name_(path + ".XXXXXX"), file_(path, mkostemp(name_.data(), O_CLOEXEC)) {
  if (!file_.is_open()) {
    throw_errno(path, errno);
  }
}

TemporaryFile::~TemporaryFile() {
  if (file_.is_open()) {
    unlink(name_.c_str());
  }
}

File TemporaryFile::appear() {
  if (std::rename(name_.c_str(), file_.path().c_str()) != 0) {
    throw_errno(file_.path(), errno);
  }
  return std::move(file_);
}

Mapping::Mapping(const File& file, uint64_t offset, size_t size, Kind kind) {
  const uint64_t start = align_down(offset, page_size());
  skip_ = static_cast<size_t>(offset - start);
  length_ = align_up(size + skip_, page_size());
  if (length_ == 0) {
    length_ = page_size();
  }
  const int protection = kind == Kind::ReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  const int flags = kind == Kind::Shared ? MAP_SHARED : MAP_PRIVATE;
  pages_ = mmap(nullptr, length_, protection, flags, file.descriptor(), static_cast<off_t>(start));
  if (pages_ == MAP_FAILED) {
    pages_ = nullptr;
    throw_errno(file.path(), errno);
  }
}

Mapping::Mapping(size_t size, size_t skip)
    : length_(align_up(skip + (size == 0 ? 1 : size), page_size())), skip_(skip) {
  if (size > static_cast<size_t>(PTRDIFF_MAX) - skip) {
    throw_errno("memory", ENOMEM);
  }
  pages_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages_ == MAP_FAILED) {
    pages_ = nullptr;
    throw_errno("memory", errno);
  }
}

Mapping::~Mapping() {
  if (pages_ != nullptr) {
    munmap(pages_, length_);
  }
}

void Mapping::moved(void* first, size_t size) noexcept {
  auto* const begin = static_cast<uint8_t*>(std::exchange(pages_, nullptr));
  auto* const hole = static_cast<uint8_t*>(first);
  const size_t before = static_cast<size_t>(hole - begin);
  const size_t behind = length_ - before - size;
  for (const auto& [left, length] : {std::pair(begin, before), std::pair(hole + size, behind)}) {
    if (length != 0) {
      munmap(left, length);
    }
  }
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(pages_, other.pages_);
  std::swap(length_, other.length_);
  std::swap(skip_, other.skip_);
  return *this;
}

} // namespace blobstore::internal
