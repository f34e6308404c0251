// Where the bytes of a delegate's constants come from.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/cache.h>
#include <blobstore/commit_follower.h>

#include "delegate/blob_names.h"
#include "delegate/inner_handle.h"
#include "delegate/inner_setup.h"

namespace blobstore::internal {

/// Which bytes a constant has: for a blob of a cache, those of one version. A constant of another data file cannot
/// change; it has no owner.
struct Identity {
  const BlobCache* owner = nullptr;
  uint64_t version = 0;

  bool operator==(const Identity& other) const { return owner == other.owner && version == other.version; }
};

/// The constants of a delegate, found in a cache or in ExecuTorch's data map. Holds what it found, except for the
/// cache.
class ConstantSources {
 public:
  /// Find all constants before the inner backend is initialized, because one that fails halfway leaves its shared cache
  /// in disorder.
  ///
  /// @param cache may be null; @param map may be null; @param constants must outlive this object.
  /// @throws Failure: a constant is nowhere, or has another size. @throws Error Closed.
  ConstantSources(
      std::shared_ptr<const BlobCache> cache,
      const et::NamedDataMap* map,
      const std::vector<DelegateConstant>& constants);

  /// What the constants are now; under a Reading.
  std::vector<Identity> identify() const;
  /// Constants that a commit changes.
  std::vector<size_t> changed_by(const StagedCommit& commit) const;
  /// The blob of a constant; nullptr if it is none of a cache.
  const Blob* blob_of(size_t i) const { return blobs_[i]; }
  /// Bytes of the constants that differ.
  uint64_t bytes_changed(const std::vector<Identity>& before, const std::vector<Identity>& after) const;
  /// The names under which the inner backend packs the constants; under a Reading.
  ///
  /// @param commit if not null, its bytes are meant where it changes a constant.
  std::vector<std::shared_ptr<const BlobName>> names(
      const InnerSetup& setup, const std::vector<Identity>& identities, const StagedCommit* commit) const;
  /// From now on, the packed weights of these constants change in place, under the names of what the file has.
  void set_written_through(std::vector<bool> through) { through_ = std::move(through); }
  bool written_through(size_t i) const { return !through_.empty() && through_[i]; }
  /// Of some constants, those whose bytes are not, or may not be, those of their file; under a Reading.
  std::vector<size_t> changed_since_file(const std::vector<size_t>& constants) const;
  /// Whether a constant is a blob of a cache itself.
  bool is_of(const BlobCache& cache, size_t i) const { return owners_[i] == &cache; }
  /// The constants that are packed and that are not an adapter's, nor packed together with one of an adapter.
  std::vector<size_t> of_foundation() const;
  /// The memory from which each constant is read.
  ///
  /// @param commit if not null, constants that it changes have their bytes from there.
  /// @param kept filled with copies that the backend may go on reading; @param passing with others.
  std::vector<InnerConstant> choose_bytes(
      const StagedCommit* commit, std::vector<AlignedCopy>& kept, std::vector<AlignedCopy>& passing) const;

 private:
  /// Bytes of a constant that come from ExecuTorch's data map.
  struct Fixed {
    std::optional<et::FreeableBuffer> buffer;
    ConstBytes view;
    std::string digest;
  };

  static Fixed make_fixed(et::FreeableBuffer&& buffer);
  bool changes(const StagedCommit& commit, size_t i) const;
  std::optional<std::string> content(size_t i, const StagedCommit* commit) const;

  std::shared_ptr<const BlobCache> cache_;
  const std::vector<DelegateConstant>& constants_;
  std::vector<const Blob*> blobs_; // parallel to the constants; null if the bytes are in fixed_
  std::vector<const BlobCache*> owners_; // parallel to the constants; null if the bytes are in fixed_
  std::vector<bool> through_; // parallel to the constants, or empty
  std::vector<Fixed> fixed_; // parallel to the constants
};

} // namespace blobstore::internal
