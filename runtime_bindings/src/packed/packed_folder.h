// A packed store: which file a load uses, and how files come and go.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/packed.h>

#include "format/digest.h"
#include "os/file.h"
#include "os/fork.h"
#include "os/scratch_file.h"
#include "packed/packed_file.h"
#include "packed/packed_keys.h"
#include "packed/packed_lease.h"

namespace blobstore::internal {

/// Whether there are packed stores. Where there are none, the compiler drops every use of one.
#ifdef BLOBSTORE_MINIMAL
inline constexpr bool kPackedStores = false;
#else
inline constexpr bool kPackedStores = true;
#endif

/// Bytes of a path that ExecuTorch takes.
inline constexpr size_t kMostPath = 255;

/// What a file is for.
struct PackedPurpose {
  Digest foundation{}; // which weights
  Digest runtime{}; // which code packed them, for which processor
  bool changes = false; // whether it is the file of a working copy
  std::optional<Digest> program{}; // whose weights alone it has; otherwise those of all programs on the foundation
};

/// What was packed, beside the bytes.
struct PackedMade {
  std::function<bool(std::string_view)> wanted; // whether an entry goes to the file, by its name
  std::set<Digest> covers; // the delegates that were packed
  std::map<std::string, std::string> maps; // those of entries, encoded, by the entry's name
  PackedKeys keys; // from which entries with a map come; only these go to the file of a working copy
};

/// A digest that tells a working copy from every other one: which file it is, its keys and their sizes.
Digest identity_of(const MappedCache& cache);

class PackedCopy;

class PackedFolder final : public PackedStore, private ForkAware, public std::enable_shared_from_this<PackedFolder> {
 public:
  PackedFolder(std::string folder, const PackedOptions& options);
  ~PackedFolder() override { leave(); }

  const std::string& folder() const override { return folder_; }
  const PackedOptions& options() const override { return options_; }
  PackedStats stats() const override;
  std::vector<PackedFile> list() const override;
  std::vector<PackedFile> verify() const override;
  std::vector<PackedFile> gc() const override;

  /// The file to use, or nullptr, also after a failure. Removes damaged files.
  std::shared_ptr<const PackedLease> find(const PackedPurpose& purpose);

  /// The right to build, which one thread of one process has at a time.
  class Building {
   public:
    explicit Building(File lock) : lock_(std::move(lock)) {}
    ~Building() { lock_.unlock(); } // a child that was forked meanwhile has the lock, too
    Building(const Building&) = delete;
    Building& operator=(const Building&) = delete;

   private:
    File lock_;
  };
  /// Wait for the right to build, and make the folder.
  /// @throws Error FileAccess: the folder cannot be written to, or another process builds for more than a minute.
  Building begin_build() const;
  /// Memory to build in.
  ScratchFile scratch() const { return ScratchFile(folder_); }
  /// Write what ExecuTorch packed to a file, together with what an older file for the same purpose has.
  ///
  /// @param made which of its entries go to the file, and their maps.
  /// @throws Error FileAccess; InvalidFile: ExecuTorch packed in an unknown way; Unsupported: the file would exceed the
  ///   limit.
  void add(const PackedPurpose& purpose, const ScratchFile& packed, PackedMade made);

  /// What follows a working copy in one of its files; nullptr if it cannot, and the statistics say why.
  std::shared_ptr<PackedCopy> copy_of(const MappedCache& cache, const std::shared_ptr<const PackedLease>& lease);

  void note_hit() { ++hits_; }
  void note_written() noexcept { ++written_; }
  void note_repacked() { ++repacked_; }
  /// @param heap by how much the anonymous memory of the process grew meanwhile, if that can be measured.
  void note_fallback(const std::string& reason, std::optional<uint64_t> heap);
  /// As `note_fallback`, because ExecuTorch did not map the file that it was given. Warns once in a process.
  void note_unmapped();

 private:
  std::vector<std::shared_ptr<CommitFollower>> copies_of(const MappedCache& cache) override;
  /// @param to_follow a working copy: then no lock is needed.
  std::shared_ptr<const PackedLease> lease(const std::string& path, bool to_follow = false);
  class Gathered;
  std::string write(const PackedPurpose& purpose, Gathered& gathered);
  void remove_replaced(const PackedPurpose& purpose, const std::string& path) const;
  std::vector<std::string> newest_first(const std::string& prefix) const;
  std::vector<PackedFile> look(bool compare) const;
  void make_room(uint64_t limit, std::vector<PackedFile>* removed) const;
  void before_fork() override { mutex_.lock(); }
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override { renew(mutex_); }

  std::string folder_; // ends with a separator
  PackedOptions options_;
  std::atomic<uint64_t> hits_{0};
  std::atomic<uint64_t> builds_{0};
  std::atomic<uint64_t> written_{0};
  std::atomic<uint64_t> repacked_{0};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<uint64_t> verified_bytes_{0};
  mutable std::mutex mutex_; // guards what follows
  std::map<std::string, std::weak_ptr<const PackedLease>> leases_; // by path
  std::map<std::pair<uint64_t, std::string>, std::weak_ptr<PackedCopy>> copies_; // by cache and path
  std::map<std::string, uint64_t> reasons_;
  uint64_t fallbacks_ = 0;
  std::optional<uint64_t> heap_bytes_;
};

} // namespace blobstore::internal
