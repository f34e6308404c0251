// For backends that derive data from blobs, such as packed weights, and must replace it when the blobs change.
#pragma once

#include <cstdint>
#include <memory>

#include <blobstore/cache.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

/// What a commit is about to change. The cache owns it. It is valid only during `CommitFollower::prepare`, except for
/// the bytes.
class StagedCommit {
 public:
  virtual ~StagedCommit() = default;
  /// The cache whose keys change. Caches on top of it see the change too.
  virtual const BlobCache& owner() const = 0;
  /// What `BlobCache::version` of these keys will be. If the commit fails, the next commit reuses this number for other
  /// bytes.
  virtual uint64_t version() const = 0;
  /// Whether a blob changes, which may be one of any cache.
  virtual bool changes(const Blob& blob) const = 0;
  /// The new bytes of a blob that changes, as many as it has. They are valid until the commit has ended, and may be
  /// unaligned.
  /// @throws Error FileAccess: they come from a file that was truncated.
  virtual const uint8_t* bytes(const Blob& blob) const = 0;
  /// Whether the new bytes are those of the file.
  virtual bool restores_file() const { return false; }
};

/// An observer that derives data from blobs and replaces it together with them. Register it with `BlobCache::follow`.
class CommitFollower {
 public:
  /// What will take effect with the commit. The cache owns it, and destroys it after the commit, when no lock is held;
  /// if the commit fails, before the next one can begin.
  class Prepared {
   public:
    virtual ~Prepared() = default;
    /// Called by the committing thread, when the bytes are new and no Reading exists. Must be short and must not block.
    virtual void apply() noexcept = 0;
  };

  virtual ~CommitFollower() = default;
  /// Prepare for a commit, while others still read the old bytes. Called by the committing thread, which holds a
  /// lock that excludes other commits to the owner. It may take a Reading of caches on top of the owner, and must not
  /// wait for other Readings to end.
  ///
  /// @returns nullptr if this follower has nothing to do.
  /// @throws Error: the commit fails with it and changes nothing.
  virtual std::unique_ptr<Prepared> prepare(const StagedCommit& commit) = 0;

  /// Whether the data that this follower shares with other processes is older than the working copy, because a process
  /// without such a follower committed, or one that was killed. Called when a Reading begins.
  virtual bool behind() const { return false; }
  /// Bring that data up to date. Called while this process has the working copy's exclusive lock.
  virtual void catch_up() noexcept {}
};

} // namespace blobstore
