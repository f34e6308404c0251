// Files and mapped memory, each owned by one object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "os/platform.h"

namespace blobstore::internal {

/// Page size of this machine.
size_t page_size();

inline uint64_t align_down(uint64_t value, uint64_t to) {
  return value - value % to;
}
inline uint64_t align_up(uint64_t value, uint64_t to) {
  return align_down(value + to - 1, to);
}

/// Whether a backend may read these bytes where they are. XNNPACK reads up to 128 bytes behind the end, without using
/// them, so these must lie on a mapped page.
inline bool has_room_behind(const void* data, size_t size) {
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + size;
  return (end - 1) / page_size() == (end + 127) / page_size();
}

/// What the system knows of a file.
struct FileStatus {
  uint64_t device;
  uint64_t inode;
  uint64_t size;
  uint64_t stored; // bytes on the disk; if there are fewer than `size`, the file has holes
  uint32_t mode; // permissions, and the bits above them
  uint32_t user; // owner
  uint32_t group;
  int64_t modified; // in nanoseconds since 1970: when bytes were last written
  int64_t changed; // ... or also a name, an owner or a permission; programs cannot set it
};

/// A file, open or closed.
class File {
 public:
  File() = default;
  /// Open a regular file.
  ///
  /// @throws Error FileAccess: it is missing, access is refused, or it is a directory or another thing without bytes.
  File(std::string path, bool writable);
  /// Take over a descriptor.
  File(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  /// Open a file for reading and writing. If it is missing, a link or not a regular file, the result is closed.
  static File open_if_there(std::string path);
  ~File();
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;

  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  bool is_open() const { return descriptor_ >= 0; }
  uint64_t size() const { return status().size; }
  FileStatus status() const;
  /// Whether both are open, and the same inode.
  bool is_same(const File& that) const;
  /// Whether every user who can have written this file could also have written that one, or to that folder; this user
  /// and root do not count.
  bool is_as_safe_as(const File& that) const;
  /// @throws Error FileAccess: the file ends before this byte; reading that far in a map would end the process.
  void check_length(uint64_t end) const;
  /// Reserve disk space for these bytes, so that writing to them through a map cannot fail. The file grows to hold
  /// them: existing bytes stay, new ones are zero. @throws Error FileAccess: for example, the disk is full.
  void reserve(uint64_t offset, uint64_t size) const;
  /// Cut the file off, or let it grow by zeros.
  void truncate(uint64_t size) const;
  void set_mode(uint32_t mode) const;
  /// Open the same inode again, independently: the new open file has locks of its own.
  File reopen() const;
  /// The same for reading and writing, even if the mode says read-only: an owner may make an exception for a moment.
  /// @throws Error FileAccess.
  File reopen_to_write() const;
  /// Wait for the kernel's lock on this open file. It ends with `unlock`, with the last descriptor of the open file, or
  /// with the process. Locks of one open file replace each other.
  void lock_shared() const { lock(false); }
  void lock_exclusive() const { lock(true); }
  void unlock() const noexcept;
  /// Read or write exactly these bytes. @throws Error FileAccess.
  void read(void* buffer, size_t size, uint64_t offset) const;
  void write(const void* buffer, size_t size, uint64_t offset) const;

 private:
  void lock(bool exclusive) const;
  File reopen_with(int access) const;

  std::string path_;
  int descriptor_ = -1;
};

/// A new file that appears under its path when it is complete. Until then its name is the path, a dot, and six
/// unpredictable characters. The destructor removes it if it did not appear.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const File& file() const { return file_; }
  /// Give the file its path, where it replaces another one.
  File appear();

 private:
  std::string name_;
  File file_;
};

/// A run of mapped pages, unmapped by the destructor.
class Mapping {
 public:
  enum class Kind { ReadOnly, Private, Shared };

  Mapping() = default;
  /// Pages of a file that cover [offset, offset + size).
  Mapping(const File& file, uint64_t offset, size_t size, Kind kind);
  /// Fresh memory, `skip` bytes into its first page.
  explicit Mapping(size_t size, size_t skip = 0);
  ~Mapping();
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept;

  /// The byte at the requested offset.
  uint8_t* data() const { return static_cast<uint8_t*>(pages_) + skip_; }
  void* pages() const { return pages_; }
  size_t length() const { return length_; }
  /// Unmap what is left after some of its pages were moved away: where they were, others may map memory meanwhile.
  void moved(void* first, size_t size) noexcept;

 private:
  void* pages_ = nullptr;
  size_t length_ = 0;
  size_t skip_ = 0;
};

} // namespace blobstore::internal
