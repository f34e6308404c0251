// A file that appears complete, or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <sys/types.h>

#include "os/file.h"

namespace blobstore::internal {

/// Writes a file beside its target, under a temporary name. `commit` brings it to the disk and renames it: at every
/// moment the target is the old file or the new one, complete, even if the process is killed or the power fails.
/// Without a commit, the destructor removes the new file, and the target is as it was.
///
/// If the target is a link that is followed, the link stays and the file that it leads to is replaced. The new file
/// takes the permissions of the file that it replaces, and its owner if this process may set that; where nothing is
/// replaced, the umask applies. Errors name the target.
///
/// One thread may use an object at a time. Every function may wait for the disk.
class OutputFile {
 public:
  /// What happens to a link at the target. The library makes none in the place of its own records.
  enum class Links { Follow, Refuse };

  /// Remove what killed processes left in the folder, and create the temporary file.
  ///
  /// @throws Error FileAccess: the folder is missing or not writable, the disk is full, or a link is refused.
  explicit OutputFile(std::string target, Links links = Links::Follow);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// @throws Error FileAccess: for example, the disk is full.
  void write(const void* data, size_t size);
  /// Make the file read-only from the moment it appears. @throws Error FileAccess.
  void make_read_only();
  /// Call once. @throws Error FileAccess: the target is as it was.
  void commit();

 private:
  void create();
  void take_over_owner(uid_t user, gid_t group, mode_t mode) const;
  void write_out(const uint8_t* data, size_t size);
  void keep_old();
  void put_back();
  [[noreturn]] void refuse(int number) const;

  std::string target_; // as the caller named it
  std::string place_; // where it leads
  std::string temporary_;
  std::string backup_; // a second name of the old file, until the new one is safe
  File file_; // the temporary file, locked
  File old_; // the replaced file, locked so that no other process removes the backup
  bool had_old_ = false;
  std::vector<uint8_t> gathered_; // small writes
  uint64_t written_ = 0;
  [[maybe_unused]] uint64_t started_ = 0; // on Linux: bytes that the system was told to write to the disk
};

/// Wait until the bytes of a file are on the disk. @returns errno, 0 for success.
int sync_file(int descriptor);

/// Wait until the names in a folder are on the disk, if the file system supports that. @returns errno, 0 for success.
int sync_folder(const std::string& path);

} // namespace blobstore::internal
