// The cache over mapped files. What each part does is in the file of that name:
//
//   placed_blobs.cpp      files are opened, and every key gets its address
//   staged_commits.h      the new bytes of a commit, as followers see them
//   commit_prepared.cpp   a commit is checked, and everything that can fail is done
//   commit_visible.cpp    the bytes change: here a commit becomes visible, to this process or to all of them
//   revert.cpp            the bytes of the files come back
//   measuring.cpp         what changed, what memory it takes, and whether it is what the files say
//   save.cpp              its blobs become a file
//   mapped_cache.cpp      looking up, locking, forking
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/reading.h>

#include "cache/followers.h"
#include "cache/placed_blobs.h"
#include "cache/thread_readings.h"
#include "cache/working_copy.h"
#include "format/digest.h"
#include "os/fair_lock.h"
#include "os/fork.h"

namespace blobstore::internal {

class MappedCache final : public BlobCache, public FileLocks, private ForkAware {
 public:
  MappedCache(
      const std::vector<std::string>& paths,
      Mode mode,
      std::string name,
      std::shared_ptr<BlobCache> base,
      std::shared_ptr<PackedStore> packed);
  ~MappedCache() override { leave(); }

  std::vector<std::string> files() const override;
  const Blob* find(std::string_view key) const override;
  size_t size() const override { return blobs_.slots().size() + of_base_.size(); }
  const Blob& blob(size_t index) const override;
  bool owns(std::string_view key) const override { return blobs_.find(key) != nullptr; }
  uint64_t generation() const override;
  uint64_t version(std::string_view key) const override;
  void follow(std::weak_ptr<CommitFollower> follower) const override;
  bool holds(const void* data, size_t size) const override;
  void close() override { closed_.store(true, std::memory_order_release); }
  bool closed() const override { return closed_.load(std::memory_order_acquire); }

  uint64_t update(const std::vector<Change>& given) override { return *update_if(given, {}); }
  /// As `update`, if other blobs of these files still have some bytes; otherwise nothing changes, and the result is
  /// empty. What was computed with such bytes must not be committed beside others.
  std::optional<uint64_t> update_if(const std::vector<Change>& given, const std::vector<Change>& unchanged);
  uint64_t revert() override;
  uint64_t revert(const std::vector<std::string>& keys) override;
  uint64_t save(const std::string& path, bool dirty_only) const override;

  std::vector<std::string> dirty() const override;
  CacheStats stats() const override;
  std::optional<std::string> recorded_digest(std::string_view key) const override;
  std::optional<std::string> file_digest(std::string_view key) const override;
  bool differs_from_file(std::string_view key) const override;
  void check_files() const override;
  bool verify() const override;

  const PlacedBlobs& placed() const { return blobs_; }
  /// In mode Shared: the working copy.
  const File& shared_file() const { return working_copy_->file(); }
  bool has_locks_on(const File& data, const File& gate) const override {
    return working_copy_ != nullptr && working_copy_->has_locks_on(data, gate);
  }
  /// In mode Shared: the digest that the file now has for a blob of its own, nullptr if it records none. It changes
  /// with the blob, so it is read under a Reading or the exclusive lock.
  const Digest* digest_now(const Blob& blob) const;
  /// `version` of a blob of its own, without looking it up.
  uint64_t version_of(const Blob& blob) const;

 private:
  /// What a commit needs besides the new bytes. It goes into the slots only when the bytes change, so that a fork finds
  /// them whole.
  struct Prepared {
    FilePages::Prepared pages;
    std::vector<uint8_t> original;
  };

  /// Whether a key's bytes may differ from those of the file as it was opened; under a Reading.
  bool is_dirty(const Slot& slot) const { return working_copy_ ? version_of(slot) != 0 : slot.dirty; }
  Slot& own_slot(const std::string& key) const;

  // commit_prepared.cpp
  void check_writable() const;
  std::vector<Change> copy_own_bytes(const std::vector<Change>& given, std::vector<std::vector<uint8_t>>& copies) const;
  std::vector<Slot*> check(const std::vector<Change>& changes) const;
  void check_unshared(
      const std::vector<Change>& changes,
      const std::vector<Slot*>& slots,
      const std::unordered_set<const Slot*>& seen) const;
  [[noreturn]] void throw_shared(const Slot& slot, const std::string& other) const;
  std::vector<Prepared> prepare(const std::vector<Change>& changes, const std::vector<Slot*>& slots) const;
  bool have_bytes(const std::vector<Change>& expected) const;
  std::unique_lock<FairLock> prepare_followers_and_lock(const StagedCommit& staged, Followers::List& prepared);
  std::unique_ptr<Reading> read_base() const;

  // commit_visible.cpp
  void commit_to_this_process(
      const std::vector<Change>& changes, const std::vector<Slot*>& slots, Followers::List& following);
  bool commit_to_all_processes(
      const std::vector<Change>& changes,
      const std::vector<Change>& unchanged,
      const std::vector<Slot*>& slots,
      Followers::List& following);
  void write(Slot& slot, Prepared&& prepared, const void* data);
  void stamp(const std::vector<Slot*>& slots);

  // revert.cpp
  void check_revertible() const;
  uint64_t finish_revert(const std::vector<Slot*>& slots, const Followers::List& following);

  std::unique_ptr<WorkingCopy::Lease> follow_others(std::unique_ptr<WorkingCopy::Lease> lease) const;
  void lock_shared() const override;
  void unlock_shared() const override;
  void before_fork() override;
  void after_fork_in_parent() override;
  void after_fork_in_child() override;

  PlacedBlobs blobs_;
  std::vector<const Blob*> of_base_; // those that no file here has

  mutable std::mutex digests_mutex_;
  mutable std::unordered_map<const Slot*, Digest> digests_; // of unchanged blobs, for which the file records none
  std::mutex commit_; // one commit at a time
  mutable FairLock lock_; // guards the bytes of the blobs, dirty_, and `dirty` and `original` of the slots
  std::mutex writing_; // held while these change; taken last
  mutable Followers followers_;
  std::set<Slot*> dirty_; // except in mode Shared
  std::atomic<uint64_t> generation_{0}; // except in mode Shared
  std::atomic<bool> closed_{false};
  mutable std::atomic<uint64_t> lookups_{0};
  mutable std::atomic<uint64_t> misses_{0};
  std::atomic<uint64_t> commits_{0};
  std::atomic<uint64_t> reverts_{0};

  std::unique_ptr<WorkingCopy> working_copy_; // in mode Shared only
  std::vector<std::shared_ptr<CommitFollower>> copies_; // what the packed store has for it; guarded by commit_
  static constexpr uint64_t kNone = UINT64_MAX;
  mutable std::atomic<uint64_t> followed_{kNone}; // the generation that no follower is behind
  mutable std::mutex catching_up_;
  mutable std::mutex leases_mutex_;
  mutable std::vector<std::unique_ptr<WorkingCopy::Lease>> leases_;
};

/// A cache as what it is: there is no other kind.
inline MappedCache& mapped(BlobCache& cache) {
  return static_cast<MappedCache&>(cache);
}
inline const MappedCache& mapped(const BlobCache& cache) {
  return static_cast<const MappedCache&>(cache);
}

} // namespace blobstore::internal
