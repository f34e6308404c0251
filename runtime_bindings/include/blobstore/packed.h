// Packed weights on disk: the form that XNNPACK computes from weights, made once and mapped by every later load.
//
//   auto packed = blobstore::PackedStore::open("/data/app/packed");
//   auto cache = blobstore::BlobCache::open({"model.ptd"}, blobstore::BlobCache::Mode::Private, nullptr, packed);
//   auto method = blobstore::Program::load("model.pte", cache)->load_method("forward"); // packs the first time only
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

class CommitFollower;

namespace internal BLOBSTORE_HIDDEN {
class MappedCache;
class PackedFolder;
} // namespace internal BLOBSTORE_HIDDEN

/// How a packed store is used.
struct PackedOptions {
  /// The size of all files together, in bytes. To stay below it, files that no living process uses are removed, the
  /// least recently used first. A file that is larger by itself is not written.
  uint64_t limit = uint64_t{4} << 30;
  /// Compare the file with its digests at every load. By default, this happens only if it is new or has changed since
  /// the last comparison.
  bool verify = false;
  /// How many bytes of the packed weights of a method, from those on that a call needs first, a load asks the system to
  /// read where they are not in memory. They are read while the load returns and the first call computes. Never more
  /// than half of the memory that the process can have. With 0, pages are read when they are used.
  uint64_t read_ahead = uint64_t{16} << 20;
};

/// A file of a packed store.
struct PackedFile {
  std::string path;
  uint64_t size = 0; // in bytes
  uint64_t entries = 0; // packed weights in it
  uint64_t mapped = 0; // of those, the ones that updates write in place
  int64_t used = 0; // when a load last used it, in seconds since 1970
  bool in_use = false; // by a living process; known on Linux only
  std::string problem; // why it cannot be used; empty if it can
  /// Entries of a working copy that `verify` could not compare: not up to date, or being written. The next load of a
  /// program writes them again.
  uint64_t unchecked = 0;
};

/// What happened through one store object in this process. Counted or measured, never estimated.
struct PackedStats {
  uint64_t hits = 0; // delegates whose weights were all in a file
  uint64_t builds = 0; // files that were written
  uint64_t fallbacks = 0; // delegates that packed weights on the heap
  std::vector<std::pair<std::string, uint64_t>> reasons; // why, and how often
  uint64_t written = 0; // packed weights that updates wrote in place
  uint64_t repacked = 0; // delegates that an update packed again, because a weight cannot be written in place
  uint64_t dropped = 0; // files that were damaged
  uint64_t verified_bytes = 0; // that were compared with digests
  uint64_t mapped_bytes = 0; // size of the files that programs use now
  std::optional<uint64_t> heap_bytes; // anonymous memory that the process took while delegates fell back
};

/// A folder with files of packed weights, one for each foundation, the data files of a cache without a base. All
/// programs on them use it: methods, input lengths, a base with adapters. Entries are named by content, so other
/// weights, scales, or layouts have other entries.
///
/// Pass it to `BlobCache::open` or `Program::load`. If the file lacks weights of a method that is loaded, all methods
/// of the program are packed into memory, and written to a new file. Later loads map this file; they pack nothing, and
/// processes share its pages. A file appears complete or not at all, and is read-only.
///
/// If no file can be used or written, weights are packed on the heap, as without a store. Programs load all the same,
/// and `stats` has the reason.
///
/// Any number of threads and processes may use a folder. While one builds, others wait for it for up to a minute; they
/// do not wait for a process that died.
class PackedStore {
 public:
  /// The folder is made when the first file is written.
  /// @throws Error FileAccess: the path exists and is not a folder.
  static std::shared_ptr<PackedStore> open(const std::string& folder, const PackedOptions& options = {});
  virtual ~PackedStore() = default;
  PackedStore(const PackedStore&) = delete;
  PackedStore& operator=(const PackedStore&) = delete;

  virtual const std::string& folder() const = 0;
  virtual const PackedOptions& options() const = 0;
  virtual PackedStats stats() const = 0;

  /// The files, the most recently used first. Their tables are read. @throws Error FileAccess.
  virtual std::vector<PackedFile> list() const = 0;
  /// As `list`, and compare all bytes with their digests. Removes nothing.
  virtual std::vector<PackedFile> verify() const = 0;
  /// Remove what killed processes left, files that are damaged or that a newer one replaced, and then those that exceed
  /// the limit. Files that a living process uses stay. @returns what was removed. @throws Error FileAccess.
  virtual std::vector<PackedFile> gc() const = 0;

 private:
  friend class internal::PackedFolder; // the only one
  friend class internal::MappedCache;
  PackedStore() = default;
  /// The packed weights of a shared working copy, of all programs.
  virtual std::vector<std::shared_ptr<CommitFollower>> copies_of(const internal::MappedCache& cache) = 0;
};

} // namespace blobstore
