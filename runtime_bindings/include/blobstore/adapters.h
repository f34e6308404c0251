// LoRA adapters: small files beside a frozen foundation, exchanged, scaled and merged while programs run.
//
//   blobstore::LogicalTensors tensors(cache);         // keep it for as long as you use adapters
//   load_adapter(tensors, "german.ptd");              // the next call uses it
//   set_adapter_strength(tensors, 0.5);               // half of it; 0 turns it off
//
//   load_adapter(tensors, "polite");                  // a folder as PEFT saved it, without an import
//
//   auto merged = merge_adapter(plain, "german.ptd"); // into the weights of a program without an adapter
//   merged->undo();                                   // exactly the bytes from before
//
// docs/format.md describes the files. After an error nothing was changed.
//
// Where a path of an adapter is taken, it may also be a folder that PEFT wrote, with adapter_config.json and
// adapter_model.safetensors. Its modules get the names of the programs, fused ones (`qkv_proj`, `gate_up_proj`) are
// split, smaller ranks and missing modules are filled up with zeros, and its scales are made up for in `lora_b`,
// rounded once. The rows of q and k of a Llama are reordered if the rotary tables in the foundation say so. It does not
// record what it was made for: only names and shapes are compared. What a program cannot compute, such as DoRA, is an
// Error Adapter that names it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

#include <blobstore/cache.h>
#include <blobstore/error.h>
#include <blobstore/export.h>
#include <blobstore/tensors.h>

namespace blobstore BLOBSTORE_API {

namespace internal BLOBSTORE_HIDDEN {
struct AdapterAccess;
class Merge;
} // namespace internal BLOBSTORE_HIDDEN

/// The fingerprint of a foundation, 32 hexadecimal digits. A file that is rewritten with the same keys, layouts and
/// contents keeps its fingerprint. Blobs are read only if a file does not record their digests. Does not block.
///
/// @param paths its .ptd, or several that are used together.
/// @throws Error FileAccess, InvalidFile, Integrity: a file cannot be opened or trusted. KeyConflict: two files have
///   different contents under one key. Adapter: a file is an adapter itself, or no file is given.
std::string foundation_fingerprint(const std::vector<std::string>& paths);

/// A tensor of a model in a data file.
struct NamedTensor {
  std::string name; // fully qualified
  int8_t scalar_type = 0; // that it has in the model
  std::vector<int64_t> sizes; // that it has in the model
  uint64_t nbytes = 0; // in the file; if it is stored in several layouts, the sum
  std::vector<std::string> keys; // that it is stored under
  std::vector<std::string> aliases; // its other names, if the model uses it in several places
};

/// The two tensors of an adapted module; its weight, of shape (out, in), becomes `W + scale * (b @ a)`.
struct LoraPair {
  std::string module;
  std::string a; // the name of the tensor of shape (rank, in)
  std::string b; // the name of the tensor of shape (out, rank)
  int64_t rank = 0;
  int64_t in_features = 0;
  int64_t out_features = 0;
};

/// An adapter that was read from a file or a folder, which it maps: the file may be renamed, replaced or deleted later,
/// but not truncated or overwritten. Never changes: any thread may use it at any time, and nothing blocks.
class Adapter {
 public:
  /// Read a file and compare its blobs with their digests, if it has any; or a folder of PEFT, whose tensors have the
  /// names that PEFT gave them.
  ///
  /// @throws Error FileAccess, InvalidFile, Integrity: the file cannot be opened or trusted. Adapter: it has no LoRA
  ///   tensors, or something in PEFT's files cannot be honoured. Layout, UnsupportedData: PEFT's tensors make no pairs
  ///   of floats.
  static std::shared_ptr<const Adapter> read(const std::string& path);
  ~Adapter();
  Adapter(const Adapter&) = delete;
  Adapter& operator=(const Adapter&) = delete;

  const std::string& path() const;
  /// The fingerprint of the foundation that it was made for; empty if the file does not record it.
  const std::optional<std::string>& foundation() const;
  /// alpha / rank; empty if the file does not record it.
  std::optional<double> scale() const;
  /// All other metadata of the file.
  const std::map<std::string, std::string>& metadata() const;
  /// Its tensors.
  const std::vector<NamedTensor>& tensors() const;
  /// Its LoRA pairs, in the order of their modules.
  const std::vector<LoraPair>& pairs() const;
  /// A tensor in the model's own shape and dtype. It holds the map of the file if it is a view of it.
  ///
  /// @throws Error KeyNotFound; Update: it is quantized, so its original values are not in the file.
  executorch::extension::TensorPtr tensor(std::string_view name) const;
  /// Everything that is wrong with the tensors: Adapter or Layout for each module without a valid pair, Update for each
  /// tensor with infinities or NaN. The functions below refuse an adapter with problems.
  std::vector<Error> problems() const;

 private:
  friend struct internal::AdapterAccess;
  struct BLOBSTORE_HIDDEN Impl;
  BLOBSTORE_HIDDEN explicit Adapter(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

/// Write an adapter, such as one that was trained here, for `load_adapter` and `Runners`: its tensors by name, the
/// fingerprint of its foundation, and its scale. Python's `save_adapter` writes the same file. An existing file is
/// replaced when the new one is complete. Reads and writes files; does not block otherwise.
///
/// @param tensors in the model's own shapes: a pair for each adapted module, and any other trained tensors. Read during
///   the call only; nobody may change them meanwhile.
/// @param foundation the .ptd that it was made for, or several that are used together.
/// @param scale the factor of the product of a pair: alpha / rank.
/// @returns the size of the file in bytes.
/// @throws Error Adapter: a pair is incomplete, there are no pairs, the scale is not finite, or a file is an adapter
///   itself. Layout: the shapes of a pair do not match. Update: a tensor is not finite. UnsupportedData: one is null or
///   not of numbers. InvalidKey: a name cannot be a key. OutputPath: the path is that of the foundation, or of a file
///   of another kind. FileAccess, InvalidFile, Integrity: the foundation cannot be read, or writing failed. An existing
///   file is unchanged.
uint64_t save_adapter(
    const std::string& path, const StateDict& tensors, const std::vector<std::string>& foundation, double scale);

/// Write an adapter with the fingerprint of another foundation than it records, or of one at all. Its contents stay the
/// same, so this says that somebody knows that it may be used there: what it was trained on is not compared any more.
///
/// @param source the file of the adapter. @param target another file.
/// @param scale alpha / rank; by default what `source` records.
/// @returns the size of the file in bytes.
/// @throws Error Adapter: `source` is a folder of PEFT or has problems, or its scale is neither given nor recorded.
///   OutputPath: `target` is one of the files. Otherwise as `Adapter::read` and `save_adapter`.
uint64_t bind_adapter(
    const std::string& source,
    const std::string& target,
    const std::vector<std::string>& foundation,
    std::optional<double> scale = std::nullopt);

/// How an adapter is loaded.
struct AdapterOptions {
  /// The factor that the program multiplies the product with. If it is not given, the scale of the adapter must be the
  /// one that the cache's files record, if they record any; that of a folder of PEFT may differ. If it differs from the
  /// adapter's scale, the adapter's `lora_b` is multiplied so that the program computes what the adapter was trained
  /// for.
  std::optional<double> program_scale;
  /// How much of the adapter the program uses: 1 is what it was trained for, 0 turns it off.
  double strength = 1;
  /// New weights of the foundation, such as a fine-tune, for the same commit: a call computes with the old weights and
  /// the old adapter, or with the new ones. They are taken as by `LogicalTensors::update_state_dict` that is not
  /// strict, except for LoRA's tensors and others of the adapter. The adapter must be made for the foundation that
  /// results. The cache itself must have the foundation's files; those of its base are changed through the base. Read
  /// during the call only.
  StateDict fine_tune = {};
};

/// Exchange the adapter that the programs on a cache run with, in one commit.
///
/// The tensors of the file are stored in the layouts that the programs use. One file therefore serves portable
/// programs, delegated ones, and quantized ones whose lowering recorded their scales.
///
/// The adapter must be made for the foundation as it is now: updates, releases that were followed, reverts and commits
/// by other processes count. Adapters that are merged do not, because their sum with this one is meant. The first call
/// for a cache computes the fingerprint of its foundation; only files without digests are read whole for that, and
/// blobs that changed since the last call.
///
/// Any thread may call it. Blocks while another thread loads, scales or merges an adapter on the same cache, while
/// `Release::follow` changes this cache or its base, and as `BlobCache::update` does. Other changes of the foundation,
/// by an update of this cache or its base, do not wait between the comparison of foundations and the commit; the caller
/// must prevent them.
///
/// @param tensors of a cache that already has the tensors of an adapter: that of the lowering or any other.
/// @param path an adapter that records its foundation, or a folder of PEFT.
/// @returns the new generation of the cache. `BlobCache::revert` restores the adapter in the cache's file.
/// @throws Error FileAccess, InvalidFile, Integrity: the file cannot be opened or trusted. DataChanged: a file of the
///   cache was overwritten in place after it was opened, so its foundation is unknown. Adapter: the adapter is for
///   another foundation than the weights are now, or does not record one; a tensor of a pair is missing; it lacks
///   tensors of the programs, which would keep those of the last adapter; or its scale is another one. KeyNotFound: the
///   cache lacks a tensor. Layout: a tensor has another shape or dtype in the cache. Update: a tensor is not finite, or
///   cannot be changed, or not in all loaded programs. Closed. Or what `BlobCache::update` throws.
uint64_t load_adapter(const LogicalTensors& tensors, const std::string& path, const AdapterOptions& options = {});

/// Change how much of the adapter that `load_adapter` loaded last the programs use, in one commit: `lora_b` becomes the
/// strength times the one in the file, which stays mapped. Repeated changes add up no rounding, because each starts
/// from the file's tensors. At strength 1 the bytes are those that `load_adapter` stored.
///
/// Threads and blocking are as for `load_adapter`.
///
/// @param strength 1 is what the adapter was trained for, 0 turns it off.
/// @returns the new generation.
/// @throws Error Adapter: no adapter was loaded, its tensors were changed or reverted since, the strength is not
///   finite, or the foundation is another one now, for which only strength 0 is possible. Update: the result is not
///   finite, or the adapter is stored quantized. FileAccess, Integrity: its file was truncated or overwritten. Closed.
///   Or what `BlobCache::update` throws.
uint64_t set_adapter_strength(const LogicalTensors& tensors, double strength);

/// An adapter among several, and how much of it.
struct AdapterShare {
  std::string path; // records its foundation, or is a folder of PEFT
  double strength = 1; // 1 is what it was trained for
};

/// Run the programs on a cache with the sum of several adapters, in one commit. Their ranks are stacked, each with its
/// own scale, and the rest is zeros. So adapters may have smaller ranks than the programs and lack modules, and without
/// adapters the programs compute what the foundation alone does.
///
/// Threads and blocking are as for `load_adapter`.
///
/// @param program_scale the factor that the program multiplies the products with; by default the scale that the cache's
///   files record, or else that of the adapters, which must be the same then.
/// @returns the new generation.
/// @throws Error as `load_adapter`; Adapter: also if the ranks together exceed that of a program, if an adapter has
///   tensors that belong to no pair, or if the scale of the program is not known. Nothing was changed.
uint64_t load_adapters(
    const LogicalTensors& tensors,
    const std::vector<AdapterShare>& adapters,
    std::optional<double> program_scale = std::nullopt);

/// Change how much of each adapter that `load_adapters` loaded last the programs use, in one commit. Each change starts
/// from the files, which stay mapped.
///
/// @param strengths one for each adapter, in the order of `load_adapters`.
/// @throws Error as `set_adapter_strength`; Adapter: also if their number differs.
uint64_t set_adapter_strengths(const LogicalTensors& tensors, const std::vector<double>& strengths);

/// How an adapter is merged.
struct MergeOptions {
  /// How much of the adapter to add: 1 adds all of it, a negative number subtracts.
  double alpha = 1;
  /// alpha / rank of the adapter; the default is what the file records, and 1 for tensors.
  std::optional<double> scale;
  /// Modules and the names of their weights, for those other than `<module>.weight`, `<module>.linear.weight`,
  /// `<module>.base.weight` and `<module>.base_layer.weight`.
  std::map<std::string, std::string> names;
  /// Float tensors to start from, by names in the cache, for weights that the cache stores quantized or combined with
  /// others. They are quantized again with the recorded scales. Read during the call only.
  StateDict weights;
  /// Also add the adapter to a weight that the model uses in several places, such as an embedding that is tied to
  /// `lm_head`: it then changes in all of them, although the adapter was trained for one.
  bool tied = false;
};

/// An adapter that `merge_adapter` added to the weights of a cache. Holds the cache, and the previous bytes of weights
/// that already differed from the cache's file. Any thread may use it at any time.
class MergedAdapter {
 public:
  ~MergedAdapter();
  MergedAdapter(const MergedAdapter&) = delete;
  MergedAdapter& operator=(const MergedAdapter&) = delete;

  const std::shared_ptr<BlobCache>& cache() const;
  /// The names of the weights that were changed.
  const std::vector<std::string>& weights() const;
  /// The generation of the commit that changed them.
  uint64_t generation() const;
  bool undone() const;

  /// Restore the exact bytes that the weights had before, in one commit. Adapters that were merged into the same
  /// weights must be undone in reverse order, those in different weights in any order. Blocks as `merge_adapter` does.
  ///
  /// @returns the new generation.
  /// @throws Error Adapter: the adapter was undone already, or the weights were changed since by an update or by
  ///   another merge that is not undone. Or what `BlobCache::update` throws. Nothing was changed.
  uint64_t undo();

 private:
  friend class internal::Merge;
  struct BLOBSTORE_HIDDEN Impl;
  BLOBSTORE_HIDDEN explicit MergedAdapter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Add an adapter to the weights of programs that have no adapter of their own, in one commit.
///
/// Each adapted weight `W` of shape (out, in) becomes `W + alpha * scale * (lora_b @ lora_a)`, computed in float32 (in
/// float64 for float64 weights) and rounded once. The same input gives the same bytes on every machine.
///
/// Any thread may call it. Other merges wait from the reading of the weights until the commit. An update of the same
/// weights by another thread or process does not wait; the caller must prevent it. Commits wait while the weights are
/// read; otherwise it blocks as `BlobCache::update` does.
///
/// @param tensors of a cache that owns the weights; weights of its base are changed through the base.
/// @param path an adapter that records its foundation, or a folder of PEFT; then `options.names` has the modules of
///   PEFT, without `base_model.model.`.
/// @throws Error as `load_adapter`; Adapter: also if there are tensors that are not LoRA's, which cannot be merged, or
///   if the model uses a weight in other places, too, and `options.tied` does not allow that. KeyNotFound: a module has
///   no weight in the cache's files. Layout: a weight has another shape. Update: a weight is quantized or combined with
///   others, and `options.weights` lacks it; a loaded program has the weight where no update reaches it; or the result
///   is not finite.
std::unique_ptr<MergedAdapter> merge_adapter(
    const LogicalTensors& tensors, const std::string& path, const MergeOptions& options = {});
/// As above, for tensors by name, of which only the shapes are checked. They are read during the call only.
std::unique_ptr<MergedAdapter> merge_adapter(
    const LogicalTensors& tensors, const StateDict& adapter, const MergeOptions& options = {});

} // namespace blobstore
