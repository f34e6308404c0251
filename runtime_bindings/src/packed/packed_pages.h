// Packed weights that change in place, together with the weights of a cache.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/commit_follower.h>

#include "os/file_pages.h"
#include "packed/packed_folder.h"

namespace blobstore::internal {

/// The pages in which one cache has its packed weights: those of a file, mapped by ExecuTorch. What a commit changes is
/// written in place, to private copies of the pages, by the maps that the file has. So at every moment outside of a
/// commit, the entries that are managed hold what XNNPACK would make of the cache's blobs.
///
/// Each cache has a path of its own for the file, so that ExecuTorch maps it for each cache. Linux only.
class PackedPages final : public std::enable_shared_from_this<PackedPages> {
  struct Entry;
  struct Registry;

 public:
  /// A change of one entry, for which all memory is allocated. Several delegates may share it.
  class Write {
   public:
    /// Call under the exclusive lock of the commit, while its bytes are valid. Further calls do nothing.
    void apply() noexcept;

   private:
    friend class PackedPages;
    std::shared_ptr<PackedPages> pages_;
    Entry* entry_ = nullptr;
    FilePages::Prepared fresh_;
    PackedSources sources_; // the new bytes of those that change
    std::vector<bool> changed_; // of the sources
    bool restores_ = false; // the file's bytes come back
    bool done_ = false;
  };
  using Writes = std::vector<std::shared_ptr<Write>>;

  /// Those of a cache without a base; nullptr if this system cannot write packed weights in place.
  static std::shared_ptr<PackedPages> of(
      const std::shared_ptr<const BlobCache>& cache,
      std::shared_ptr<PackedFolder> store,
      const std::shared_ptr<const PackedLease>& lease);
  PackedPages(
      std::shared_ptr<const BlobCache> cache,
      std::shared_ptr<PackedFolder> store,
      std::shared_ptr<const PackedLease> lease);
  ~PackedPages();
  PackedPages(const PackedPages&) = delete;
  PackedPages& operator=(const PackedPages&) = delete;

  /// What ExecuTorch is given.
  const std::string& path() const { return path_; }
  const PackedLease& lease() const { return *lease_; }
  /// Let an entry that has a map follow the cache. Under a Reading.
  ///
  /// @param keys of the weight, the bias and the scales; empty for one that is missing.
  /// @throws Error FileAccess: there is not enough memory.
  void manage(const PackedEntry& entry, const std::vector<std::string>& keys);

  // Called under the lock of all handles, around the initializations on this path, under a Reading.
  void before_init();
  /// @returns false if ExecuTorch did not map the file. @throws Error FileAccess.
  bool after_init();
  void after_destroy();

  /// Prepare some entries that are managed for a commit that changes them.
  /// @throws Error FileAccess: there is not enough memory.
  Writes prepare(const StagedCommit& commit, const std::set<const PackedEntry*>& entries);

 private:
  struct Entry {
    const PackedMap* map = nullptr;
    std::vector<const Blob*> blobs; // that it is made of; nullptr for one that is missing
    std::optional<FilePages> pages; // once ExecuTorch has mapped the file, and the entry was changed
    std::weak_ptr<Write> pending; // of the commit that is being prepared
  };

  std::shared_ptr<Write> prepare_write(const PackedEntry& at, Entry& entry, const StagedCommit* commit, bool restores);
  void write(Write& write) noexcept;
  void synchronize(const PackedEntry& at, Entry& entry);

  const std::shared_ptr<const BlobCache> cache_;
  const std::shared_ptr<PackedFolder> store_;
  const std::shared_ptr<const PackedLease> lease_;
  File file_; // for the path
  std::string path_;
  std::mutex mutex_; // guards what follows
  std::unordered_map<const PackedEntry*, Entry> entries_;
  uint8_t* base_ = nullptr; // where ExecuTorch has mapped the file
  size_t handles_ = 0;
  std::vector<uint8_t*> others_; // maps of the file that other caches have
};

} // namespace blobstore::internal
