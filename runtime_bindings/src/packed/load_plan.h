// What a load does about packed weights: which file they are looked up in, or where they are packed to; and what came
// of it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/cache.h>

#include "format/constants.h"
#include "format/digest.h"
#include "format/text_hash.h"
#include "os/read_ahead.h"
#include "packed/packed_folder.h"

namespace blobstore::internal {

/// The only backend whose packed weights ExecuTorch can keep in a file.
inline constexpr char kXnnpack[] = "XnnpackBackend";
// its options; other backends ignore them
inline constexpr char kWeightCacheOption[] = "weight_cache_enabled";
inline constexpr char kPackedPathOption[] = "packed_cache_path";
/// A text for messages of `PackedStats`.
inline constexpr char kChangedBefore[] = "weights had been changed when the method was loaded";
inline constexpr char kNotInCopies[] = "some weights cannot be written in a working copy";

/// Which code packs here, for which processor; empty if this system does not say.
std::optional<Digest> packing_runtime();

/// All blobs of a cache and of those below, as their files have them. Empty if some are unknown. Under a Reading.
std::optional<Digest> contents_of(const BlobCache& cache);
/// The weights that all programs on a cache have in common: those of the lowest cache. A working copy stays the same
/// foundation when its weights change. Empty if some are unknown. Under a Reading.
std::optional<Digest> foundation_of(const BlobCache& cache);
const BlobCache& lowest(const BlobCache& cache);

/// By how much the anonymous memory of this process grows, from the making of the object on.
class HeapGrowth {
 public:
  HeapGrowth();
  /// Empty if this system does not say.
  std::optional<uint64_t> bytes() const;

 private:
  std::optional<uint64_t> before_;
};

/// Load what was packed to a file once more, and return the entries that are packed again although the file has them.
/// XNNPACK packs a deconvolution at every load and compares: if the entry differs, the next call reads an invalid
/// address. So such an entry saves nothing, and a file that has it must never differ from the blobs.
std::set<std::string> packed_again(const ScratchFile& packed, const std::function<void()>& load_again);

/// What a load of a method does about the packed weights of one backend's delegates.
struct Packing {
  const char* backend = nullptr;
  std::optional<PackedPurpose> purpose{}; // empty if no file can have them
  std::string fallback{}; // why there is no file, or no complete one
  std::shared_ptr<const PackedLease> file{}; // where they are looked up; may be null
  std::shared_ptr<PackedCopy> copy{}; // what keeps that file up to date, if it belongs to a working copy
  const ScratchFile* scratch = nullptr; // where they are packed to while a file is built; null otherwise

  /// Of the file for all of them; empty for the heap.
  std::string path() const;
};

/// What a load of a method does about packed weights. Nothing of it changes while the load lasts.
struct LoadPlan {
  std::shared_ptr<PackedFolder> store{}; // null if nothing is kept in files
  uint64_t generation = 0; // of the cache when the plan was made
  Packing own{kBackendId}; // blobstore's delegates look themselves up in the file
  Packing stock{kXnnpack}; // XNNPACK's own, whose names do not tell all contents: a file is for one program
  bool must_cover = false; // refuse one of blobstore's delegates that its file does not cover
  const executorch::runtime::NamedDataMap* trial = nullptr; // if not null, weights to pack in place of the program's
};

/// What came of one load, or of several with plans to build.
struct LoadResult {
  bool refused = false; // a delegate had to be covered and was not
  std::vector<FileRange> used; // of the plan's file, where the entries of the method lie

  // Of what blobstore's delegates packed to their scratch file:
  std::set<Digest> covers; // the delegates that did
  std::unordered_set<std::string, TextHash> names; // of their weights, without those of adapters
  std::set<std::string> again; // entries that every load packs: they are kept in no file
  std::map<std::string, std::optional<PackedMap>> learned; // by what decides how weights are packed
  std::map<std::string, std::string> maps; // of entries, proved and encoded
  PackedKeys keys; // of these entries, those that can be written in a working copy

  /// Whether an entry of ExecuTorch is kept: it belongs to `names` (one, or that of a weight and that of its bias), and
  /// not to `again`.
  bool wants(std::string_view entry) const;
  /// What their file gets; refers to this, and empties it of the rest.
  PackedMade made();
};

} // namespace blobstore::internal
