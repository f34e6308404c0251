// The tensors of a model by their names in the model, and the blobs that store them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

#include <blobstore/cache.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

namespace internal BLOBSTORE_HIDDEN {
struct TensorsAccess;
}

/// Tensors by name, as ExecuTorch's own `load_state_dict` returns them.
using StateDict = std::map<std::string, executorch::extension::TensorPtr>;

/// Read the tensors of a .ptd, under their keys, or of a .safetensors file. The first bytes decide which of the two it
/// is, or else the ending of the name. Blobs of a .ptd that are opaque bytes are left out: packed weights, whose
/// tensors `LogicalTensors` knows, and records.
///
/// All bytes are read once and compared with the digests of the file, if it has any. The tensors are views of the
/// mapped file and keep it mapped; only a tensor that the file does not align is a copy. Writing to a tensor changes a
/// private copy of its pages, never the file. Replace the file by renaming: if it is truncated while it is mapped, the
/// system ends any process that reads a lost page.
///
/// @throws Error FileAccess, InvalidFile, Integrity. UnsupportedData: ExecuTorch has no such tensors (parts of
///   a byte, sizes or strides above 2**31-1, more than 16 dimensions).
StateDict load_state_dict(const std::string& path);

/// A tensor of a model, as updates take it.
struct LogicalTensor {
  std::string name; // fully qualified
  int8_t scalar_type = 0; // that an update must have
  std::vector<int64_t> sizes; // that an update must have
  std::vector<std::string> aliases; // other names of the same tensor
  std::vector<std::string> keys; // of the blobs that an update changes: that store it, of scales, biases beside them
  std::vector<std::string> needs; // tensors that must be updated together with it: one blob stores all of them
  std::string refusal; // why it cannot be changed; empty if it can
  bool auxiliary = false; // whether a state dict may lack it: scales, non-persistent buffers, and state
};

/// What an update did to a tensor that is stored as integers.
struct Quantized {
  std::string name; // of the tensor
  std::string key; // of the blob that stores it
  uint64_t numbers = 0; // how many it has
  uint64_t clipped = 0; // how many of these lie outside of what its scales can express, and were limited or are NaN
  uint64_t rescaled = 0; // how many channels or groups of it got another scale, which follows from its new numbers
};

/// What an update did. Where a number is expected, it is the new generation.
struct Updated {
  uint64_t generation = 0;
  /// Each blob of integers that was made of new numbers; also of a bias that was not given, but whose integers count
  /// steps of its weight's scales, if these changed.
  std::vector<Quantized> quantized;

  operator uint64_t() const { return generation; }
};

/// The tensors that the records in the files of a cache describe. Holds the cache.
///
/// Making one reads all records once; keep it for as long as you update by name. Threads: any thread may call any
/// function at any time. Updates block as `BlobCache::update` does.
class LogicalTensors {
 public:
  /// @throws Error InvalidFile: records are damaged. KeyConflict: two records of one blob contradict each other.
  /// Closed.
  explicit LogicalTensors(std::shared_ptr<BlobCache> cache);
  ~LogicalTensors();
  LogicalTensors(const LogicalTensors&) = delete;
  LogicalTensors& operator=(const LogicalTensors&) = delete;

  const std::shared_ptr<BlobCache>& cache() const;

  /// The names of the tensors, without aliases.
  std::vector<std::string> names() const;
  /// Whether there is a tensor with this name or alias.
  bool contains(std::string_view name) const;
  /// @throws Error KeyNotFound; the message names similar ones.
  LogicalTensor at(std::string_view name) const;

  /// A copy of the current value of a tensor, from one generation, in its own shape and in the dtype that it is stored
  /// in.
  ///
  /// @throws Error KeyNotFound; Update: its blob does not contain it, because it was quantized, packed or combined.
  executorch::extension::TensorPtr value(std::string_view name) const;

  /// Change tensors of the model by name, or blobs by key, in one commit: all or none. Each is given in the model's own
  /// shape and dtype; a quantized one also as the integers that are stored. The data is read during the call.
  ///
  /// Numbers are quantized with scales that follow from them, where these are blobs: those of channels and groups. The
  /// scale of a whole tensor is in the program and stays, so larger numbers are clipped.
  ///
  /// @param finite refuse infinities and NaN.
  /// @returns the new generation, and how many numbers of which tensors were clipped.
  /// @throws Error KeyNotFound, Layout (another shape or dtype), Update (it cannot be changed, or not without others,
  ///   or is not finite), or what `BlobCache::update` throws. After an error nothing was changed.
  Updated update(const StateDict& tensors, bool finite = false) const;
  /// Change everything in a model's state dict that the programs on the cache use, in one commit. Other entries and the
  /// programs' own state are ignored.
  ///
  /// @param strict refuse if a tensor of the loaded programs is missing or cannot be changed, or if one of the programs
  ///   has weights that no update reaches. While no program is loaded, all tensors of the data files count. Refuse also
  ///   if more than one in a thousand numbers of a tensor would be clipped.
  /// @throws as `update`. Update: also if nothing in `tensors` can be updated.
  Updated update_state_dict(const StateDict& tensors, bool strict = true, bool finite = false) const;

 private:
  friend struct internal::TensorsAccess;
  struct BLOBSTORE_HIDDEN Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace blobstore
