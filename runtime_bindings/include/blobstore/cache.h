// Blobs of any number of .ptd files in memory, looked up as one and changeable while programs run on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/layout.h>

namespace blobstore {

/// One blob. Its address is its own and never changes while the cache lives: a commit changes the bytes, not the place.
/// No two keys share an address, even if a file stores their bytes once.
struct Blob {
  std::string key;
  std::optional<Layout> layout; // nothing: opaque bytes
  uint8_t* data = nullptr; // never null, also without bytes
  size_t size = 0;
  uint32_t alignment = 1; // in bytes, of its place in the file; memory keeps it up to the size of a page
};

/// New bytes for a key. The memory is the caller's and is read until the commit returns.
struct Change {
  std::string key;
  const void* data = nullptr;
  size_t size = 0;
  const std::optional<Layout>* layout = nullptr; // checked against the blob's, if given
};

class BlobCache;

/// What a commit is about to change, while everything is still as it was. Valid as long as `CommitFollower::prepare`.
class StagedCommit {
 public:
  virtual ~StagedCommit() = default;
  /// The cache whose keys change; caches on top of it see it.
  virtual const BlobCache& owner() const = 0;
  /// What `BlobCache::version` of these keys will be.
  virtual uint64_t version() const = 0;
  /// Whether the key changes.
  virtual bool changes(std::string_view key) const = 0;
  /// The bytes that such a key will have, as many as its blob has now. Valid until the commit has ended; aligned to
  /// nothing. @throws Error FileAccess: they are those of a file that was truncated.
  virtual const uint8_t* bytes(std::string_view key) const = 0;
};

/// Somebody who makes something of the blobs, such as packed weights, and has to change it together with them.
class CommitFollower {
 public:
  /// What will take effect with the commit. Destroyed after it, or without it, where nobody waits.
  class Prepared {
   public:
    virtual ~Prepared() = default;
    /// The bytes are the new ones; nobody holds a Reading. To be short, and to wait for nobody.
    virtual void apply() noexcept = 0;
  };

  virtual ~CommitFollower() = default;
  /// Make ready for a commit; readers go on meanwhile. This thread holds a lock that excludes other commits to the
  /// owner; it may take a Reading of caches on top of it, and must not wait for anybody else's to end.
  ///
  /// @returns nothing if nothing has to be done.
  /// @throws Error: the commit fails with it and changes nothing.
  virtual std::unique_ptr<Prepared> prepare(const StagedCommit& commit) = 0;
};

/// Counted and measured, never estimated. What this system cannot measure is absent.
struct CacheStats {
  uint64_t keys = 0; // those of the base included
  uint64_t mapped_bytes = 0; // address space of this cache, without its base
  std::optional<uint64_t> resident_bytes; // of that, in memory now, shared or not
  std::optional<uint64_t> private_bytes; // of that, this process' own: changed pages
  uint64_t dirty_keys = 0;
  uint64_t dirty_bytes = 0;
  uint64_t lookups = 0; // by key, by whomever; a lookup that goes on to the base counts in both
  uint64_t misses = 0; // of those, without result
  uint64_t commits = 0; // through this object, in this process
  uint64_t reverts = 0;
};

/// A writable cache of blobs.
///
/// Threads: everything may be called from any thread. A commit is alone; whoever holds a `Reading` sees one generation.
/// Life time: programs and the buffers of a data map hold the cache; its memory goes with the last of them.
class BlobCache : public std::enable_shared_from_this<BlobCache> {
 public:
  enum class Mode {
    Private, // clean pages are the page cache's, a write copies its page; nobody else sees a commit
    Shared, // one file that several processes map and change together; see working_copy.h
    Copy, // read into memory of its own: immune to whatever happens to the files
  };

  /// Open files and decide whether they can be trusted. Keys that several files hold must be equal there.
  ///
  /// @param base a cache whose blobs are found through this one too, unless a file here has the key. Memory of the base
  ///   is shared, not copied; its commits are seen here.
  /// @throws Error FileAccess, InvalidFile, Integrity, KeyConflict, Unsupported.
  static std::shared_ptr<BlobCache> open(
      const std::vector<std::string>& paths,
      Mode mode = Mode::Private,
      std::shared_ptr<BlobCache> base = nullptr);

  virtual ~BlobCache() = default;
  BlobCache(const BlobCache&) = delete;
  BlobCache& operator=(const BlobCache&) = delete;

  /// Unlike that of any other cache of this process, ever.
  uint64_t id() const { return id_; }
  Mode mode() const { return mode_; }
  /// The files, for messages.
  const std::string& name() const { return name_; }
  const std::shared_ptr<BlobCache>& base() const { return base_; }

  /// The blob under a key, nullptr if there is none. Valid as long as the cache.
  virtual const Blob* find(std::string_view key) const = 0;
  /// As `find`; @throws Error KeyNotFound, Closed.
  const Blob& at(std::string_view key) const;
  /// All keys: those of the files in their order, then the base's others.
  virtual size_t size() const = 0;
  virtual const Blob& blob(size_t index) const = 0;
  /// Whether the key is in this cache's own files, so that it can be changed here.
  virtual bool owns(std::string_view key) const = 0;

  /// Grows with every commit or revert, here or in the base.
  virtual uint64_t generation() const = 0;
  /// The generation of the key's last change in the cache that owns it; 0 if it is as in the file.
  /// Also told when the cache is closed: whoever still runs on it follows what happens to the base, or in other
  /// processes. @throws Error KeyNotFound.
  virtual uint64_t version(std::string_view key) const = 0;

  /// Change blobs: all or none, and nobody who holds a `Reading` sees the change happen. Everything is checked and all
  /// memory is got before the first byte is written, and so is what followers make of the new bytes.
  ///
  /// @returns the new generation.
  /// @throws Error KeyNotFound, KeyConflict (a key twice), Layout, Closed, Unsupported, or what a follower throws (the
  ///   delegate: Program, if its inner backend refuses the new bytes); nothing was changed then.
  virtual uint64_t update(const std::vector<Change>& changes) = 0;
  /// Change the blobs that a .ptd holds. It is read into memory first: what is compared with its digests, if it has any, is
  /// what is committed, whatever happens to the file meanwhile.
  /// @throws as `open` and `update`; nothing was changed then.
  uint64_t load(const std::string& path);
  /// Back to the bytes of the file, whole or some keys. The work is that of what changed, not of the cache.
  /// @throws Error KeyNotFound, Closed, Unsupported (a shared working copy has no other bytes to go back to), FileAccess (a
  ///   file was truncated), or as a follower throws; nothing was changed then.
  virtual uint64_t revert() = 0;
  virtual uint64_t revert(const std::vector<std::string>& keys) = 0;

  /// Have a follower take part in every commit to this cache from now on, while it lives. Commits to the base are
  /// another cache's. Whoever holds a Reading since before it made something of the blobs misses no commit.
  virtual void follow(std::weak_ptr<CommitFollower> follower) const = 0;

  /// Keys of this cache's files whose bytes are not, or may not be, those of the file as it was opened.
  virtual std::vector<std::string> dirty() const = 0;
  virtual CacheStats stats() const = 0;
  /// The digest that a file records for a blob that is as in the file; nothing if it changed or none is recorded.
  virtual std::optional<std::string> recorded_digest(std::string_view key) const = 0;
  /// Tell whether the files that are mapped are as long as they were, as reading a page that is lost ends the process; the
  /// base's are its own to check. @throws Error FileAccess: one was truncated.
  virtual void check_files() const = 0;
  /// Compare the files' blobs with their digests as they are in memory; what was changed here is left out.
  /// @returns whether every file had digests. @throws Error Integrity; FileAccess: a file was truncated.
  virtual bool verify() const = 0;

  /// Whether any of these bytes lie in memory of this cache or its base, so that a commit may change them.
  virtual bool holds(const void* data, size_t size) const = 0;

  /// Refuse everything from now on, except to programs and views that exist: for them the weights stay, unless the base
  /// or another process changes some. A commit that has begun still happens.
  virtual void close() = 0;
  virtual bool closed() const = 0;
  /// @throws Error Closed.
  void check_open() const;

  /// While it lives no commit happens, in this cache or its base. May be nested in one thread. Not for long: commits
  /// wait for it, and a commit from the thread that made it is an error. It may be destroyed by another thread.
  ///
  /// In a forked child, one that the forking thread made goes on, unless the process has no file descriptors left for the
  /// locks of a shared working copy; one that ended that way, or that another thread made, keeps no commit out any more.
  /// What is called in the child takes a Reading of its own, so it sees one generation, or reports that error.
  struct HeldByThread;
  class Reading {
   public:
    explicit Reading(const BlobCache& cache);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    std::unique_ptr<Reading> base_; // taken first, given back last
    const BlobCache& cache_;
    std::shared_ptr<HeldByThread> thread_; // the one that made it
  };

 protected:
  BlobCache(Mode mode, std::string name, std::shared_ptr<BlobCache> base);

  [[noreturn]] void throw_missing(std::string_view key) const;
  virtual void lock_shared() const = 0;
  virtual void unlock_shared() const = 0;
  /// Whether this thread holds a Reading.
  bool held_by_this_thread() const;
  /// End this thread's Readings without giving back a lock, which was not to be had in a forked child.
  void lose_reading() const;
  /// While it lives, this thread counts as one that holds a Reading, without a lock: it has the exclusive one.
  class Alone {
   public:
    explicit Alone(const BlobCache& cache);
    ~Alone();
    Alone(const Alone&) = delete;
    Alone& operator=(const Alone&) = delete;

   private:
    const BlobCache& cache_;
  };

 private:
  uint64_t id_;
  Mode mode_;
  std::string name_;
  std::shared_ptr<BlobCache> base_;
};

} // namespace blobstore
