// The packed weights of a shared working copy: a file that all processes map and that follows the working copy.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <blobstore/commit_follower.h>

#include "cache/mapped_cache.h"
#include "packed/packed_keys.h"
#include "packed/packed_lease.h"

namespace blobstore::internal {

/// One process's map of such a file. All entries hold what XNNPACK would make of the working copy's blobs, whenever no
/// process holds the exclusive lock: the process that commits writes them before it lets go of the lock. If it was
/// killed, or had no store, the next process that reads does.
///
/// The file says which contents each entry is made of, by the digests of the blobs as they were read, so nothing can
/// get lost, and an entry that was made of a damaged blob is made anew.
class PackedCopy final : public CommitFollower, public std::enable_shared_from_this<PackedCopy> {
 public:
  /// @param cache in mode Shared, which must outlive this object.
  /// @param written counts the entries that it writes.
  /// @throws Error FileAccess: the file cannot be written to; InvalidFile: it does not fit the cache.
  PackedCopy(
      const MappedCache& cache,
      std::shared_ptr<const PackedLease> lease,
      std::shared_ptr<std::atomic<uint64_t>> written);

  std::unique_ptr<Prepared> prepare(const StagedCommit& commit) override;
  bool behind() const override;
  void catch_up() noexcept override;

 private:
  struct Follow;
  struct Entry {
    const PackedMap* map;
    uint8_t* packed;
    PackedSources sources;
    uint64_t size; // of `packed`, in bytes
    Digest* digest; // of these bytes; zero while they are written
    std::vector<const Blob*> blobs; // those of the sources that are there
    Digest* made_of; // the digests of what they were
  };
  struct State { // at the start of kPackedState; the digests follow
    std::atomic<uint64_t> generation; // of the working copy that all entries have
    uint64_t reserved;
  };

  void add(const std::string& name, const std::vector<std::string>& keys, Digest* digests);

  const MappedCache& cache_;
  const std::shared_ptr<const PackedLease> lease_;
  const std::shared_ptr<std::atomic<uint64_t>> written_;
  Mapping map_;
  State* state_ = nullptr;
  std::vector<Entry> entries_;
  std::atomic<bool> seen_{false}; // whether it has caught up in this process
};

} // namespace blobstore::internal
