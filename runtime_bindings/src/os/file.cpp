#include "os/file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <blobstore/error.h>

namespace blobstore::internal {
namespace {

[[noreturn]] void refuse(const std::string& path, int number) {
  throw Error(ErrorKind::FileAccess, path, std::strerror(number), number);
}

} // namespace

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

File::File(std::string path, bool writable) : path_(std::move(path)) {
  descriptor_ = open(path_.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    refuse(path_, errno);
  }
  struct stat status;
  if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    const bool directory = S_ISDIR(status.st_mode);
    close(descriptor_);
    descriptor_ = -1;
    if (directory) {
      refuse(path_, EISDIR);
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

uint64_t File::size() const {
  struct stat status;
  if (fstat(descriptor_, &status) != 0) {
    refuse(path_, errno);
  }
  return static_cast<uint64_t>(status.st_size);
}

uint64_t File::inode() const {
  struct stat status;
  if (fstat(descriptor_, &status) != 0) {
    refuse(path_, errno);
  }
  return static_cast<uint64_t>(status.st_ino);
}

void File::check_length(uint64_t end) const {
  if (const uint64_t found = size(); found < end) {
    throw Error(
        ErrorKind::FileAccess,
        path_,
        "the file was truncated: it has " + std::to_string(found) + " bytes, " + std::to_string(end) + " are expected",
        EIO);
  }
}

void File::reserve(uint64_t offset, uint64_t size) const {
#ifdef __linux__
  int failed;
  do {
    failed = fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(size));
  } while (failed != 0 && errno == EINTR);
  if (failed == 0) {
    return;
  }
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    refuse(path_, errno);
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
#ifdef __linux__
  // by descriptor, because the path may lead to another file by now
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor_);
  const int descriptor = open(link.c_str(), (fcntl(descriptor_, F_GETFL) & O_ACCMODE) | O_CLOEXEC);
#else
  const int descriptor = open(path_.c_str(), (fcntl(descriptor_, F_GETFL) & O_ACCMODE) | O_CLOEXEC);
#endif
  if (descriptor < 0) {
    refuse(path_, errno);
  }
  return File(path_, descriptor);
}

void File::read(void* buffer, size_t size, uint64_t offset) const {
  auto* to = static_cast<uint8_t*>(buffer);
  while (size > 0) {
    const ssize_t got = pread(descriptor_, to, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      refuse(path_, errno);
    }
    if (got == 0) {
      throw Error(ErrorKind::FileAccess, path_, "it was truncated: no byte at " + std::to_string(offset), EIO);
    }
    to += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

void File::write(const void* buffer, size_t size, uint64_t offset) const {
  const auto* from = static_cast<const uint8_t*>(buffer);
  while (size > 0) {
    const ssize_t put = pwrite(descriptor_, from, size, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put < 0) {
      refuse(path_, errno);
    }
    from += put;
    offset += static_cast<uint64_t>(put);
    size -= static_cast<size_t>(put);
  }
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
    refuse(file.path(), errno);
  }
}

Mapping::Mapping(size_t size, size_t skip)
    : length_(align_up(skip + (size == 0 ? 1 : size), page_size())), skip_(skip) {
  if (size > static_cast<size_t>(PTRDIFF_MAX) - skip) {
    refuse("memory", ENOMEM);
  }
  pages_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages_ == MAP_FAILED) {
    pages_ = nullptr;
    refuse("memory", errno);
  }
}

Mapping::~Mapping() {
  if (pages_ != nullptr) {
    munmap(pages_, length_);
  }
}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(pages_, other.pages_);
  std::swap(length_, other.length_);
  std::swap(skip_, other.skip_);
  return *this;
}

} // namespace blobstore::internal
