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

/// What a load of a method does about packed weights. Nothing of it changes while the load lasts.
struct LoadPlan {
  std::shared_ptr<PackedFolder> store; // null if nothing is kept in files

  // Looking up
  std::shared_ptr<const PackedLease> file; // for blobstore's delegates; may be null
  bool must_cover = false; // refuse a delegate that `file` does not cover
  std::string fallback; // why there is no file, or no complete one
  std::shared_ptr<const PackedLease> stock_file; // for XNNPACK's own delegates, without blobstore's around them
  std::shared_ptr<PackedCopy> stock_copy; // if that is the file of a working copy

  // Building: where delegates pack to. Null otherwise.
  const ScratchFile* scratch = nullptr;
  const ScratchFile* stock_scratch = nullptr;
  const executorch::runtime::NamedDataMap* trial = nullptr; // if not null, weights to pack in place of the program's
};

/// What came of one load, or of several with plans to build.
struct LoadResult {
  bool refused = false; // a delegate had to be covered and was not
  std::vector<FileRange> used; // of the plan's file, where the entries of the method lie

  // Of what was packed to `scratch`:
  std::set<Digest> covers; // the delegates that did
  std::unordered_set<std::string, TextHash> names; // of their weights, without those of adapters
  std::set<std::string> again; // entries that every load packs: they are kept in no file
  std::map<std::string, std::optional<PackedMap>> learned; // by what decides how weights are packed
  std::map<std::string, std::string> maps; // of entries, proved and encoded
  PackedKeys keys; // of these entries, those that can be written in a working copy

  /// Whether an entry of ExecuTorch is kept: it belongs to `names` (one, or that of a weight and that of its bias), and
  /// not to `again`.
  bool wants(std::string_view entry) const;
};

} // namespace blobstore::internal
