// What the records in a source of blobs say together: which tensors there are, which blobs are made of them, and what
// cannot be changed.
#pragma once

#include <deque>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "format/blob_source.h"
#include "format/records.h"
#include "format/text_hash.h"
#include "logical/ordered.h"

namespace blobstore::internal {

/// The refusal of a tensor that is in no data file.
constexpr char kEmbeddedRefusal[] =
    "no data file has it under its name: it is a constant inside the program, or save_programs moved it under a key of "
    "its contents; pass ExecutorchBackendConfig(external_constants=lambda node: 'model') to to_executorch() to have it "
    "in model.ptd under its name";

/// A tensor of the model. It can have several names, which programs may each have kept a different one of. The
/// *canonical* name is the one that was seen first.
struct Tensor {
  std::vector<std::string_view> names; // the canonical one first
  int8_t scalar_type = 0;
  std::vector<int64_t> sizes;
  std::vector<const Record*> made_into; // the records of the blobs that are made of it, if it can be changed
  std::vector<std::string_view> own_keys; // under which it is stored as it is, without a delegate's layout
  std::string refusal; // why it cannot be changed; empty if it can
  bool auxiliary = false; // whether a state dict need not have it

  std::string name() const { return std::string(names.front()); }
};

/// Never changes, so any thread may use it. Pointers are valid as long as the index.
class Index {
 public:
  /// @param source must outlive the index. All its records are read here; other blobs are not.
  /// @throws Error InvalidFile: records are damaged. KeyConflict: two records of one blob contradict each other.
  explicit Index(const BlobSource& source);

  const BlobSource& source() const { return source_; }
  /// In the order in which they were seen.
  const std::vector<const Tensor*>& tensors() const { return tensors_; }
  /// The tensor with a name or alias, or nullptr.
  const Tensor* find(std::string_view name) const;
  /// All names of tensors, as they were seen.
  const std::vector<std::string_view>& names() const { return names_; }
  /// The records of blobs, each once, as they were seen.
  const std::vector<const Record*>& records() const { return records_; }
  /// The record of a blob, or nullptr.
  const Record* record(std::string_view key) const;
  /// The records of the blobs that are quantized with the scales under a key.
  const std::vector<const Record*>& quantized_with(std::string_view scales) const;
  /// The records of the scales that are products of those under a key: of the biases beside the weights.
  const std::vector<const Record*>& products_of(std::string_view scales) const;
  /// The keys of the blobs that an update of a tensor may change, each once: those that store it, the scales that
  /// follow from its numbers, and the biases that follow these.
  std::vector<std::string> keys_changed_with(const Tensor& tensor) const;
  /// Whether the scales under a key can change with the weights. They cannot where a bias would have to follow, and the
  /// records do not say how.
  bool can_rescale(std::string_view scales) const;
  /// The tensor of a source of one of the records.
  const Tensor& tensor_of(const SourceTensor& source) const { return *find(source.name); }
  /// What lowering wrote of each delegate.
  const std::vector<std::unique_ptr<Records>>& delegates() const { return delegates_; }
  /// The tensors that cannot be changed, in the order in which that was found out.
  const std::vector<const Tensor*>& refused() const { return refused_; }

 private:
  /// A tensor while names are still being connected.
  struct Group {
    Group* merged_into = nullptr;
    const SourceTensor* first = nullptr; // has the sizes and the type
    std::list<std::string_view> names;
    Tensor* tensor = nullptr;
  };

  void read();
  void know(const Records& delegate);
  void connect(const SourceTensor& source);
  Group* group_of(std::string_view name) const;
  void make_tensors();
  Tensor* find_tensor(std::string_view name) const;
  void find_uses();
  void find_scales();
  void refuse(Tensor& tensor, const std::string& reason);
  void refuse_ambiguous();
  void refuse_sources(const Record& record);
  void refuse_embedded();
  void find_auxiliary();
  void refuse_companions();

  const BlobSource& source_;
  std::vector<std::unique_ptr<Records>> delegates_;
  std::deque<Group> groups_;
  TextMap<Group*> group_by_name_;
  Ordered<std::string> ambiguous_; // why, by name
  std::deque<Tensor> tensor_memory_;
  std::vector<const Tensor*> tensors_;
  std::vector<std::string_view> names_;
  std::vector<const Record*> records_;
  TextMap<const Record*> record_by_key_;
  std::vector<const Tensor*> refused_;
  TextMap<std::vector<const Record*>> quantized_with_;
  TextMap<std::vector<const Record*>> products_of_;
  TextSet fixed_scales_;
};

} // namespace blobstore::internal
