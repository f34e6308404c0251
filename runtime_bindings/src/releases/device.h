// The folder of a device, and the files that were fetched for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <blobstore/releases.h>

#include "os/file.h"
#include "releases/index.h"
#include "releases/parts.h"

namespace blobstore::internal {

/// First byte, and first byte behind it.
using Range = std::pair<uint64_t, uint64_t>;

/// A range of a file that is here.
struct LocalBytes {
  std::string path;
  uint64_t offset = 0;
  uint64_t size = 0;
};

/// Bytes of objects, as fetched files have them.
class FetchedFiles {
 public:
  /// Look at the names in a folder; it ends with a separator.
  explicit FetchedFiles(const std::string& folder);

  /// The name of the file for a range of an object.
  static std::string name(const ReleaseObject& object, uint64_t start, uint64_t stop);
  /// The place of a range of an object; empty if no file has all of it. Files of a wrong size have nothing.
  std::optional<LocalBytes> find(const ReleaseObject& object, uint64_t start, uint64_t stop) const;

 private:
  struct Piece {
    std::string path;
    uint64_t start = 0;
    std::optional<uint64_t> stop; // empty for all of the object
    uint64_t size = 0; // of the file
  };
  std::map<std::string, std::vector<Piece>> pieces_; // by SHA-256
};

/// The folder of a device, to read it without a lock: the current release may be another one at any moment.
class Installed {
 public:
  explicit Installed(const std::string& directory);

  /// Its path, for messages.
  std::string name() const { return folder_.substr(0, folder_.size() - 1); }
  std::string file(const std::string& sha256) const { return files_ + sha256; }
  std::string release(const std::string& view) const { return releases_ + view; }

  /// What `current` leads to: the SHA-256 of an index, perhaps with a suffix; empty if there is no release.
  /// @throws Error InvalidFile: it is no link to a release.
  std::string view() const;
  /// An index that is here. @throws Error FileAccess, InvalidFile, Integrity.
  ReleaseIndex index(const std::string& sha256) const;
  /// What the files of a release that is here consist of. @throws Error FileAccess, Integrity, InvalidFile.
  ReleaseParts parts(const ReleaseIndex& index) const;

 protected:
  std::string index_bytes(const std::string& sha256) const;

  std::string folder_; // each ends with a separator
  std::string files_;
  std::string indexes_;
  std::string releases_;
};

/// The folder of a device, locked against other processes as long as this lives.
class Device : public Installed {
 public:
  /// Make the folder, wait for its lock, and remove what killed processes left. @throws Error FileAccess.
  explicit Device(const std::string& directory);

  const std::string& incoming() const { return incoming_; }
  /// The release below which no other one counts: the current one, or a newer one that was marked; empty if there
  /// was none. The release that was last switched to, or was about to be when that failed, is marked, also if nothing
  /// leads to it.
  /// @throws Error FileAccess, InvalidFile, Integrity.
  std::optional<ReleaseMark> mark() const;
  bool has(const ReleaseObject& object) const;

  /// Check that the needed bytes fit on the disk. @throws Error FileAccess: they do not; it names the largest file.
  void check_room(const ReleaseObject& largest, uint64_t needed) const;
  /// Whether all files of a release are here under their names; their contents are not read.
  bool is_complete(const ReleaseIndex& index, const std::string& view) const;
  /// The contents of all files that are here, by SHA-256.
  const std::map<std::string, LocalBytes>& blobs();

  /// Make a release whose files are here the current one.
  void switch_to(const ReleaseIndex& index, const std::string& bytes, const std::string& sha256) const;
  void remove_fetched() const;

  /// Remove all but the newest releases, and what they do not need.
  /// @param keep how many releases stay, with the current one, which is there.
  Collected gc(uint64_t keep) const;

 private:
  std::set<std::string> needed_by(const std::string& view) const;
  std::vector<std::string> views() const;
  void add_blobs(const std::string& view, std::set<std::string>& seen);

  std::string incoming_; // ends with a separator
  File lock_;
  std::optional<std::map<std::string, LocalBytes>> blobs_;
};

/// A small file, whole. @throws Error FileAccess; InvalidFile: it has more bytes than `limit`.
std::string read_small(const std::string& path, uint64_t limit);

/// Call a function with a range of a file, in pieces. @throws Error FileAccess: also if the file is too short.
template <typename Use>
void read_pieces(const LocalBytes& bytes, const Use& use) {
  const File file(bytes.path, /*writable=*/false);
  std::vector<uint8_t> room(std::min<uint64_t>(bytes.size, 1 << 20));
  for (uint64_t done = 0; done < bytes.size;) {
    const size_t size = static_cast<size_t>(std::min<uint64_t>(room.size(), bytes.size - done));
    file.read(room.data(), size, bytes.offset + done);
    use(room.data(), size);
    done += size;
  }
}

/// The SHA-256 of a range of a file.
std::string sha256_of(const LocalBytes& bytes);
/// Whether a range of a file has a SHA-256; not if it cannot be read.
bool has_digest(const LocalBytes& bytes, const std::string& sha256);

} // namespace blobstore::internal
