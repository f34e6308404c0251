// Adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors. What a program cannot
// honour is refused.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "format/tensor_view.h"
#include "os/file.h"

namespace blobstore::internal {

/// What PEFT puts before the names of the base model.
constexpr std::string_view kPeftPrefix = "base_model.model.";

/// The two tensors of a module, views of the mapped file.
struct PeftPair {
  std::string module; // as Hugging Face's model calls it
  std::string a_key;
  std::string b_key;
  TensorView a; // of shape (rank, in)
  TensorView b; // of shape (out, rank)
  double scale = 1; // the factor of their product
};

/// A folder that was read. Owns the map of the tensors. Never changes.
class PeftFolder {
 public:
  /// @throws Error FileAccess, InvalidFile: a file cannot be opened, or is malformed. Adapter: a field or a tensor
  ///   cannot be honoured. Layout: the shapes of a pair do not match. UnsupportedData: a tensor is of no float type.
  explicit PeftFolder(const std::string& path);

  /// In the order of the file.
  const std::vector<PeftPair>& pairs() const { return pairs_; }
  /// The scale of most pairs.
  double scale() const { return scale_; }
  /// What the product of a pair must be multiplied with, beside `scale`.
  double factor(const PeftPair& pair) const { return pair.scale == scale_ ? 1 : pair.scale / scale_; }
  /// alpha / r, whatever single modules have.
  double plain_scale() const { return plain_scale_; }
  /// The fields `base_model_name_or_path` and `task_type`, if they are texts.
  const std::map<std::string, std::string>& origin() const { return origin_; }
  /// @throws Error FileAccess: the file of the tensors was truncated since it was opened.
  void check_length() const { file_.check_length(size_); }

 private:
  File file_; // the tensors
  uint64_t size_ = 0;
  std::vector<PeftPair> pairs_; // each tensor holds the map
  double scale_ = 1;
  double plain_scale_ = 1;
  std::map<std::string, std::string> origin_;
};

} // namespace blobstore::internal
