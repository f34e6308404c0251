// Updates by name: from the names that a model's author knows to the blobs that must change.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include <blobstore/error.h>
#include <blobstore/layout.h>
#include <blobstore/tensors.h>

#include "format/tensor_view.h"
#include "logical/index.h"
#include "logical/scales.h"
#include "logical/similar_names.h"

namespace blobstore::internal {

/// A new value for a tensor of the model or for a blob. The caller owns the bytes, unless the view has an owner.
struct Given {
  std::string name; // of a tensor, or a key
  TensorView value; // its sizes are those of its dimensions by number
  std::vector<uint8_t> dim_order; // of its bytes
  std::string opaque; // what messages call it if it is bytes without a dtype, such as "bytes"; empty for a tensor
};

/// A tensor as a new value, in the tensor's own memory.
Given given_of(const std::string& name, const executorch::aten::Tensor& tensor);

/// New contents of a blob: memory of the caller, or its own.
struct NewBlob {
  std::string key;
  TensorView bytes;
  std::optional<Layout> layout;
  bool has_layout = false; // whether it must equal that of the blob
};

/// What an update changes.
struct Changes {
  std::vector<NewBlob> blobs;
  std::vector<NewBlob> used; // copies of the blobs that values were computed with, such as scales
  std::vector<Quantized> quantized;
};

/// An entry of a state dict.
struct Entry {
  std::string_view name;
  bool is_floating = false; // whether it is a floating-point tensor
};

using NamesInUse = std::set<std::string>;

/// Never changes, so any thread may use it.
class Updates {
 public:
  /// @param source must outlive this. @throws as Index.
  explicit Updates(const BlobSource& source) : source_(source), index_(source) {}

  const Index& index() const { return index_; }

  /// @throws Error KeyNotFound, as `unknown`.
  LogicalTensor describe(std::string_view name) const;

  /// Check that an update of these names is possible.
  /// @throws Error KeyNotFound: a name is neither a key nor a tensor. Update: a tensor cannot be changed.
  void check_names(const Names& names) const;

  /// The blobs that change in an update. Values are read here; the result may refer to their memory.
  ///
  /// @param finite refuse infinities and NaN.
  /// @throws Error as `LogicalTensors::update`, before anything changes.
  Changes changes(const std::vector<Given>& given, bool finite) const;
  /// Check one value for a tensor as far as no other tensor is needed. @throws Error Layout, UnsupportedData.
  void check(const Given& given) const;

  /// The current value of a tensor, or of a key with a layout, in its own shape and in the dtype that it is stored in.
  /// @returns a view of the blob's memory, or a copy if the order of its dimensions must be changed.
  /// @throws Error KeyNotFound; Update: its value is not stored. UnsupportedData: a dtype that updates do not take.
  TensorView value(std::string_view name) const;

  /// The entries of a state dict to update: those that the programs have, without state.
  /// @param in_use the names of the tensors of loaded programs, which `strict` is about; null: of all programs.
  /// @throws Error Update, as `LogicalTensors::update_state_dict`.
  Names choose(const std::vector<Entry>& entries, bool strict, const NamesInUse* in_use = nullptr) const;

  /// Check that delegates and kernels have the same tensor where they have one of the same name.
  /// @param origin the program that was lowered to these files, for messages. @throws Error KeyConflict.
  void check_stored(const std::string& origin) const;

  /// The error for tensors of which none can be updated; it lists those that were given and those of the programs.
  Error mismatch(const Names& given) const;
  /// The error for a name that is neither a key nor a tensor.
  Error unknown(std::string_view name) const;
  /// Tensors and keys whose names differ from a name only in prefixes, or in what wrappers of modules insert.
  Names similar(std::string_view name) const;

 private:
  bool knows(std::string_view name) const { return index_.find(name) != nullptr || source_.contains(name); }
  using Values = std::unordered_map<const Tensor*, TensorView>;
  /// The blobs that are made of tensors.
  void resolve(const std::vector<const Given*>& given, bool finite, Changes& changes) const;
  Values values_of(const std::vector<const Given*>& given, bool finite, std::vector<const Tensor*>& tensors) const;
  std::vector<TensorView> sources_of(const Record& record, const Values& values) const;
  NewBlob make(const Record& record, const Values& values, Scales& scales, std::vector<Quantized>& quantized) const;
  NewBlob follow(const Record& bias, const Scales& scales, Changes& changes) const;
  TensorView packed_groups(const Record& record) const;
  bool can_rescale(const Step& step, const Values& values) const;
  bool is_stored(const std::string& key, const TensorView& bytes) const;
  NewBlob direct_change(std::string_view key, const Given& given) const;
  TensorView take(const Tensor& tensor, const Given& given, bool finite) const;
  TensorView blob_bytes(const std::string& key) const;
  std::optional<TensorView> stored(const SourceTensor& source) const;
  void check_complete(
      const Record& record, const std::vector<const Tensor*>& tensors, const std::vector<bool>& given) const;
  Names choose_tensors(const Names& available, bool strict, const NamesInUse* in_use, Names& missing) const;
  void check_frozen(const NamesInUse* in_use) const;
  void check_propagated(const std::vector<Entry>& entries, const NamesInUse* in_use) const;
  Names plain_keys() const;
  Names known_names() const;
  std::string hint(const Names& names) const;
  void check_prefix(const Names& names, const Names& missing) const;
  std::string misspelt(const Names& names, const Names& missing) const;

  const BlobSource& source_;
  Index index_;
};

} // namespace blobstore::internal
