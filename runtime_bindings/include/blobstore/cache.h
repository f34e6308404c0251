// Blobs of any number of .ptd files in memory: looked up as one map, and changed while programs run on them.
//
// Backends and other code that reads blobs while commits may happen, or that derives data from them, also need
// <blobstore/reading.h> and <blobstore/commit_follower.h>.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/export.h>
#include <blobstore/layout.h>

namespace blobstore BLOBSTORE_API {

namespace internal BLOBSTORE_HIDDEN {
class MappedCache;
} // namespace internal BLOBSTORE_HIDDEN

class BlobCache;
class CommitFollower;
class PackedStore;

/// One blob. The cache owns it and its bytes; both are valid as long as the cache lives. The address never changes: a
/// commit changes the bytes in place. No two keys share an address, even if a file stores their bytes once.
struct Blob {
  std::string key;
  std::optional<Layout> layout; // empty for opaque bytes
  const uint8_t* data = nullptr; // only commits write there; never null, not even for an empty blob
  size_t size = 0; // in bytes
  uint32_t alignment = 1; // of its place in the file, in bytes; memory keeps it up to the size of a page
};

/// New bytes for a key. Copies share the bytes.
struct Change {
  Change() = default;
  /// A tensor of ExecuTorch (`executorch::extension::TensorPtr`), which this holds. Its dtype, sizes and dim order must
  /// be those of the blob. @throws Error UnsupportedData: it is null, or has no data.
  template <typename Tensor, typename = decltype(std::declval<const Tensor&>().dim_order())>
  Change(std::string name, const std::shared_ptr<Tensor>& tensor) : key(std::move(name)) {
    if (tensor == nullptr) {
      hold(nullptr, nullptr, 0, {});
      return;
    }
    Layout found{static_cast<int8_t>(tensor->scalar_type()), {tensor->sizes().begin(), tensor->sizes().end()}, {}};
    const auto order = tensor->dim_order();
    for (size_t i = 0; i < found.sizes.size(); ++i) { // without an order it is row-major
      found.dim_order.push_back(order.data() != nullptr ? order[i] : static_cast<uint8_t>(i));
    }
    hold(tensor, tensor->const_data_ptr(), tensor->nbytes(), std::move(found));
  }
  /// Numbers, which this owns: the bytes of the blob, whatever its layout is.
  template <typename Number>
  Change(std::string name, std::vector<Number> numbers) : key(std::move(name)) {
    static_assert(std::is_trivially_copyable_v<Number> && !std::is_same_v<Number, bool>, "not plain bytes in memory");
    const auto owned = std::make_shared<const std::vector<Number>>(std::move(numbers));
    data = owned->data();
    size = owned->size() * sizeof(Number);
    owner = owned;
  }
  /// Memory of the caller, who must keep it, as it is, until the commit returns.
  Change(std::string name, const void* bytes, size_t nbytes, const std::optional<Layout>* expected = nullptr)
      : key(std::move(name)), data(bytes), size(nbytes), layout(expected) {}

  std::string key;
  const void* data = nullptr;
  size_t size = 0; // in bytes
  const std::optional<Layout>* layout = nullptr; // if given, it must equal the layout of the blob
  std::shared_ptr<const void> owner; // of the memory; null if it is the caller's

 private:
  void hold(const std::shared_ptr<const void>& tensor, const void* bytes, size_t nbytes, Layout found);
};

/// Counted or measured, never estimated. Values that this system cannot measure are empty.
struct CacheStats {
  uint64_t keys = 0; // including those of the base
  uint64_t mapped_bytes = 0; // address space of this cache, without its base
  std::optional<uint64_t> resident_bytes; // of that, in memory now, shared or not
  std::optional<uint64_t> private_bytes; // of that, memory of this process alone: changed pages
  uint64_t dirty_keys = 0;
  uint64_t dirty_bytes = 0;
  uint64_t lookups = 0; // by key; a lookup that continues in the base counts in both caches
  uint64_t misses = 0; // of those, the ones that found nothing
  uint64_t commits = 0; // through this object, in this process
  uint64_t reverts = 0;
};

/// A writable cache of blobs.
///
/// Threads: any thread may call any function at any time. Commits (`update`, `load`, `revert`) run one at a time and
/// block until every `Reading` of the cache has ended. Functions that look at the state of blobs (`dirty`, `stats`,
/// `verify`) take a Reading and so block while a commit changes bytes. `open` in mode Shared blocks while other
/// processes use the file. Nothing else blocks.
///
/// Lifetime: programs and the buffers of a data map hold the cache. Its memory is freed when the last holder is gone.
class BlobCache : public std::enable_shared_from_this<BlobCache> {
 public:
  enum class Mode {
    /// Maps the files. Clean pages belong to the page cache, and a write copies its page. No other process sees
    /// commits.
    Private,
    /// One file, a working copy, that several processes map and change together; see docs/runtime.md.
    Shared,
    /// Reads the files into memory. Nothing that happens to the files later matters.
    Copy,
  };

  /// Open files and check whether they can be trusted. If several files hold a key, its contents must be equal in all.
  ///
  /// @param base a cache in which this one looks up keys that no file here has. The memory of the
  ///   base is shared, not copied, and its commits are seen here. The new cache holds the base.
  /// @param packed where programs on this cache keep packed weights, see packed.h. By default, that of the base, if
  /// any.
  /// @throws Error FileAccess, InvalidFile, Integrity, KeyConflict, Unsupported.
  static std::shared_ptr<BlobCache> open(
      const std::vector<std::string>& paths,
      Mode mode = Mode::Private,
      std::shared_ptr<BlobCache> base = nullptr,
      std::shared_ptr<PackedStore> packed = nullptr);

  virtual ~BlobCache() = default;
  BlobCache(const BlobCache&) = delete;
  BlobCache& operator=(const BlobCache&) = delete;

  /// Unique in this process; never reused.
  uint64_t id() const { return id_; }
  Mode mode() const { return mode_; }
  /// The files, for messages.
  const std::string& name() const { return name_; }
  const std::shared_ptr<BlobCache>& base() const { return base_; }
  /// As given; may be null.
  const std::shared_ptr<PackedStore>& packed() const { return packed_; }
  /// The paths of the files as given, without those of the base.
  virtual std::vector<std::string> files() const = 0;

  /// The blob under a key, or nullptr. Valid as long as the cache.
  virtual const Blob* find(std::string_view key) const = 0;
  /// As `find`; @throws Error KeyNotFound, Closed.
  const Blob& at(std::string_view key) const;
  /// The number of keys: those of the files in file order, then those that only the base has.
  virtual size_t size() const = 0;
  /// The blob at a position below `size`.
  virtual const Blob& blob(size_t index) const = 0;
  /// Whether the key is in this cache's own files, so that it can be changed here.
  virtual bool owns(std::string_view key) const = 0;

  /// Grows with every commit or revert, here or in the base.
  virtual uint64_t generation() const = 0;
  /// The generation of the key's last change, counted by the cache that owns the key; 0 if it never changed. A revert
  /// is a change too. Also works on a closed cache, because programs that still run on one must follow commits to the
  /// base and by other processes. @throws Error KeyNotFound.
  virtual uint64_t version(std::string_view key) const = 0;

  /// Change all of these blobs or none: no Reading sees part of a commit. Everything is checked, all memory is
  /// allocated, and all followers prepare before the first byte changes.
  ///
  /// @returns the new generation.
  /// @throws Error KeyNotFound, KeyConflict (a key twice), Layout, Closed, Unsupported, or what a follower throws (the
  ///   delegate throws Program if its inner backend refuses the new bytes). After an error nothing was changed.
  virtual uint64_t update(const std::vector<Change>& changes) = 0;
  /// Commit the blobs that a .ptd holds. The file is first read into memory and compared with its digests, if it has
  /// any. Exactly these bytes are committed, even if the file changes meanwhile.
  /// @throws as `open` and `update`; after an error nothing was changed.
  uint64_t load(const std::string& path) { return load_all({path}); }
  /// The same for several files in one commit, such as a fine-tune and its adapter.
  /// @throws Error KeyConflict: also if two files have different contents under one key.
  uint64_t load_all(const std::vector<std::string>& paths);
  /// Restore the bytes of the file, for all keys or for some. The work depends on what changed, not on the size of the
  /// cache.
  /// @throws Error KeyNotFound, Closed, Unsupported (a shared working copy has no older bytes), FileAccess (a file was
  ///   truncated), or what a follower throws; after an error nothing was changed.
  virtual uint64_t revert() = 0;
  virtual uint64_t revert(const std::vector<std::string>& keys) = 0;

  /// Write the blobs of this cache's files, all from one generation, to a .ptd. Blobs with equal bytes are stored once.
  /// Commits wait while the blobs are copied to the file, but not while the file is synced.
  ///
  /// At every moment `path` is the old file or the new one, complete, even if the process is killed or the power fails.
  /// If it is a link, the file that it leads to is replaced.
  ///
  /// @param dirty_only only the blobs that were changed: a delta for `load`.
  /// @returns the size of the file in bytes.
  /// @throws Error Closed. OutputPath: the cache or its base maps the file, or `path` is a file of another kind, or a
  ///   data file that was written together with programs. FileAccess: for example, the disk is full, or a file of this
  ///   cache was truncated. InvalidKey, InvalidAlignment: another writer's file has a key or an alignment that this one
  ///   does not write. DataChanged: something other than a commit changed bytes while they were written. After an error
  ///   `path` is unchanged.
  virtual uint64_t save(const std::string& path, bool dirty_only = false) const = 0;

  /// Let a follower take part in every commit to this cache from now on, as long as it lives; see commit_follower.h.
  /// Follow the base as well to take part in its commits. Register while holding the Reading under which the derived
  /// data was made; then no commit is missed. The cache keeps no ownership. Does not block.
  virtual void follow(std::weak_ptr<CommitFollower> follower) const = 0;

  /// Keys of this cache's files whose bytes differ, or may differ, from those of the file when it was opened.
  virtual std::vector<std::string> dirty() const = 0;
  virtual CacheStats stats() const = 0;
  /// The digest that a file records for a blob; empty if none is recorded, or if the blob ever changed, even if it was
  /// reverted.
  virtual std::optional<std::string> recorded_digest(std::string_view key) const = 0;
  /// The digest of a blob's bytes as its file had them when it was opened, even if they changed since. It is computed
  /// once, unless the file records it. Empty for a working copy that has changed. The caller holds a Reading.
  /// @throws Error KeyNotFound; FileAccess: the file was truncated.
  virtual std::optional<std::string> file_digest(std::string_view key) const = 0;
  /// Whether a blob's bytes differ, or may differ, from those of its file. The caller holds a Reading.
  /// @throws Error KeyNotFound.
  virtual bool differs_from_file(std::string_view key) const = 0;
  /// Check that the mapped files are still as long as when they were opened, because reading a lost page ends the
  /// process. The files of the base are not checked. @throws Error FileAccess: one was truncated.
  virtual void check_files() const = 0;
  /// Compare the blobs in memory with the digests of the files; blobs that were changed here are skipped.
  /// @returns whether every file had digests. @throws Error Integrity; FileAccess: a file was truncated.
  virtual bool verify() const = 0;

  /// Whether any of these bytes lie in memory of this cache or its base, so that a commit may change them.
  virtual bool holds(const void* data, size_t size) const = 0;

  /// Refuse all further use. Programs and views that exist keep working: their weights stay as they are, unless the
  /// base or another process changes some. A commit that has already begun still happens.
  virtual void close() = 0;
  virtual bool closed() const = 0;
  /// @throws Error Closed.
  void check_open() const;

  class Reading; // in reading.h

 private:
  friend class internal::MappedCache; // the only kind of cache
  BlobCache(Mode mode, std::string name, std::shared_ptr<BlobCache> base, std::shared_ptr<PackedStore> packed);

  [[noreturn]] void throw_missing(std::string_view key) const;
  virtual void lock_shared() const = 0;
  virtual void unlock_shared() const = 0;

  uint64_t id_;
  Mode mode_;
  std::string name_;
  std::shared_ptr<BlobCache> base_;
  std::shared_ptr<PackedStore> packed_;
};

/// Write the blobs of some .ptd files to one file for `BlobCache::open` in mode Shared. Every key has its own bytes
/// there, even where two keys are equal, because the processes that share the file may change one and not the other.
///
/// Reads all blobs, and waits for the disk. Writes as `BlobCache::save` does. The file records which keys came from
/// which file, so that adapters fit as on these, and what their programs multiply adapters with if they agree on that.
///
/// @returns the size of the file in bytes.
/// @throws Error FileAccess, InvalidFile, Integrity: a file cannot be opened or trusted. KeyConflict: two files have
///   different contents under one key. OutputPath and others, as `BlobCache::save`. After an error `target` is
///   unchanged.
uint64_t make_working_copy(const std::vector<std::string>& paths, const std::string& target);

} // namespace blobstore
