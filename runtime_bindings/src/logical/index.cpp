#include "logical/index.h"

#include <algorithm>
#include <set>
#include <unordered_set>

#include <blobstore/error.h>

#include "format/constants.h"
#include "logical/numbers.h"
#include "logical/steps.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr size_t kLongRefusal = 4096;

std::string two_shapes(const std::vector<int64_t>& one, const std::vector<int64_t>& other) {
  return format(
      "programs have tensors of different shapes with this name, {} and {}; open a cache for each",
      to_string(one),
      to_string(other));
}

} // namespace

Index::Index(const BlobSource& source) : source_(source) {
  read();
  for (const auto& delegate : delegates_) {
    know(*delegate);
  }
  make_tensors();
  find_uses();
  find_scales();
  refuse_ambiguous();
  for (const auto& delegate : delegates_) {
    for (const Record& record : delegate->records) {
      if (!record.refusal.empty()) {
        refuse_sources(record);
      }
    }
  }
  refuse_embedded();
  find_auxiliary();
  refuse_companions();
}

const Tensor* Index::find(std::string_view name) const {
  return find_tensor(name);
}

void Index::read() {
  const std::shared_ptr<const void> held = source_.hold();
  for (size_t i = 0; i < source_.size(); ++i) {
    const std::string_view key = source_.key(i);
    if (key.rfind(kKeyPrefix, 0) != 0) {
      continue;
    }
    const std::optional<SourceBlob> blob = source_.find(key);
    if (!blob || !is_records(key, blob->data, blob->size)) {
      continue;
    }
    if (key != records_key(blob->data, blob->size)) {
      throw_error_in(
          ErrorKind::InvalidFile, source_.name(), "the records of a delegate do not have the digest in '{}'", key);
    }
    delegates_.push_back(std::make_unique<Records>(parse_records(blob->data, blob->size, source_.name())));
  }
}

/// Take in the tensors and the blobs that a delegate's records describe.
void Index::know(const Records& delegate) {
  for (const Record& record : delegate.records) {
    for (const SourceTensor& source : record.sources) {
      connect(source);
    }
    if (!record.refusal.empty()) {
      continue;
    }
    const auto [known, is_new] = record_by_key_.emplace(record.key, &record);
    if (is_new) {
      records_.push_back(&record);
    } else if (!(known->second->steps == record.steps) || known->second->nbytes != record.nbytes) {
      throw_error_in(ErrorKind::KeyConflict, source_.name(), "two records describe '{}' differently", record.key);
    }
  }
  for (const SourceTensor& source : delegate.outside) {
    connect(source);
  }
}

Index::Group* Index::group_of(std::string_view name) const {
  const auto found = group_by_name_.find(name);
  if (found == group_by_name_.end()) {
    return nullptr;
  }
  Group* root = found->second;
  while (root->merged_into != nullptr) {
    root = root->merged_into;
  }
  for (Group* at = found->second; at != root;) { // later look-ups take one step
    Group* next = at->merged_into;
    at->merged_into = root;
    at = next;
  }
  return root;
}

/// Take in a tensor under all its names, which may connect tensors that seemed to be several.
void Index::connect(const SourceTensor& source) {
  std::vector<std::string_view> names{source.name};
  names.insert(names.end(), source.aliases.begin(), source.aliases.end());
  Group* group = nullptr;
  const auto note_shape = [&](const std::vector<int64_t>& sizes) {
    if (sizes != group->first->sizes) {
      ambiguous_[std::string(group->names.front())] = two_shapes(group->first->sizes, sizes);
    }
  };
  for (const std::string_view name : names) {
    Group* known = group_of(name);
    if (known == nullptr || known == group) {
      continue;
    }
    if (group == nullptr) {
      group = known;
      continue;
    }
    note_shape(known->first->sizes);
    known->merged_into = group;
    group->names.splice(group->names.end(), known->names);
  }
  if (group == nullptr) {
    group = &groups_.emplace_back();
    group->first = &source;
  } else {
    note_shape(source.sizes);
  }
  for (const std::string_view name : names) {
    if (group_by_name_.emplace(name, group).second) {
      group->names.push_back(name);
      names_.push_back(name);
    }
  }
}

void Index::make_tensors() {
  for (Group& group : groups_) {
    if (group.merged_into != nullptr) {
      continue;
    }
    Tensor& tensor = tensor_memory_.emplace_back();
    tensor.names.assign(group.names.begin(), group.names.end());
    tensor.scalar_type = group.first->scalar_type;
    tensor.sizes = group.first->sizes;
    for (const std::string_view name : tensor.names) {
      if (source_.contains(name)) {
        tensor.own_keys.push_back(name);
      }
    }
    group.tensor = &tensor;
    tensors_.push_back(&tensor);
  }
}

Tensor* Index::find_tensor(std::string_view name) const {
  auto found = group_by_name_.find(name);
  if (found == group_by_name_.end()) {
    return nullptr;
  }
  const Group* group = found->second;
  while (group->merged_into != nullptr) {
    group = group->merged_into;
  }
  return group->tensor;
}

void Index::find_uses() {
  for (const Record* record : records_) {
    for (const SourceTensor& source : record->sources) {
      std::vector<const Record*>& uses = find_tensor(source.name)->made_into;
      if (uses.empty() || uses.back() != record) {
        uses.push_back(record);
      }
    }
  }
}

void Index::find_scales() {
  for (const Record* record : records_) {
    if (const Step* step = scaled_step(*record)) {
      quantized_with_[step->names[0]].push_back(record);
    }
    if (!record->product_of.empty()) {
      products_of_[record->product_of].push_back(record);
    }
  }
  for (const auto& delegate : delegates_) {
    std::set<uint32_t> unknown; // groups with scales of a bias, or of something unknown
    for (const Record& record : delegate->records) {
      const auto& uses = quantized_with(record.key);
      const bool is_weight = !uses.empty() &&
          std::none_of(uses.begin(), uses.end(), [](const Record* use) { return is_quantized_bias(*use); });
      if (record.auxiliary && record.refusal.empty() && this->record(record.product_of) == nullptr && !is_weight) {
        unknown.insert(record.group);
      }
    }
    for (const Record& record : delegate->records) {
      if (const Step* step = scaled_step(record); step != nullptr && unknown.count(record.group) != 0) {
        fixed_scales_.insert(step->names[0]);
      }
    }
  }
}

const Record* Index::record(std::string_view key) const {
  const auto found = record_by_key_.find(key);
  return found == record_by_key_.end() ? nullptr : found->second;
}

const std::vector<const Record*>& Index::quantized_with(std::string_view scales) const {
  static const std::vector<const Record*> none;
  const auto found = quantized_with_.find(scales);
  return found == quantized_with_.end() ? none : found->second;
}

const std::vector<const Record*>& Index::products_of(std::string_view scales) const {
  static const std::vector<const Record*> none;
  const auto found = products_of_.find(scales);
  return found == products_of_.end() ? none : found->second;
}

std::vector<std::string> Index::keys_changed_with(const Tensor& tensor) const {
  std::vector<std::string> keys;
  const auto add = [&](const std::string& key) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      keys.push_back(key);
    }
  };
  for (const Record* record : tensor.made_into) {
    add(record->key);
  }
  for (const Record* record : tensor.made_into) {
    const Step* step = scaled_step(*record);
    if (step == nullptr || is_quantized_bias(*record)) { // the scales of a bias follow from its weight's
      continue;
    }
    const std::string& scales = step->names[0];
    add(scales);
    for (const Record* product : products_of(scales)) {
      add(product->key);
      for (const Record* bias : quantized_with(product->key)) {
        add(bias->key);
      }
    }
  }
  return keys;
}

bool Index::can_rescale(std::string_view scales) const {
  if (record(scales) == nullptr || !source_.contains(scales) || fixed_scales_.count(scales) != 0) {
    return false;
  }
  for (const Record* product : products_of(scales)) {
    const auto& biases = quantized_with(product->key);
    const bool follow = std::all_of(biases.begin(), biases.end(), [](const Record* bias) {
      return is_quantized_bias(*bias) && &bias->steps.back() == scaled_step(*bias);
    });
    if (biases.empty() || !follow || !source_.contains(product->key)) {
      return false;
    }
  }
  return true;
}

void Index::refuse(Tensor& tensor, const std::string& reason) {
  if (tensor.refusal.empty()) {
    tensor.refusal = reason;
    refused_.push_back(&tensor);
  }
}

/// Refuse names under which there are tensors of different shapes.
void Index::refuse_ambiguous() {
  for (Tensor& tensor : tensor_memory_) {
    for (const std::string_view key : tensor.own_keys) {
      const std::optional<Layout>& layout = *source_.find(key)->layout;
      if (layout && !std::equal(layout->sizes.begin(), layout->sizes.end(), tensor.sizes.begin(), tensor.sizes.end())) {
        ambiguous_[tensor.name()] =
            two_shapes(tensor.sizes, std::vector<int64_t>(layout->sizes.begin(), layout->sizes.end()));
      }
    }
  }
  for (const auto& [name, reason] : ambiguous_) {
    Tensor& tensor = *find_tensor(name);
    if (!tensor.refusal.empty()) {
      tensor.refusal = reason;
    } else {
      refuse(tensor, reason);
    }
    tensor.made_into.clear();
  }
}

/// Note why the sources of a record cannot be changed; state of one method may be a constant of another.
void Index::refuse_sources(const Record& record) {
  for (const SourceTensor& source : record.sources) {
    Tensor& tensor = *find_tensor(source.name);
    if (record.refusal == kStateRefusal && (!tensor.made_into.empty() || !tensor.own_keys.empty())) {
      continue;
    }
    refuse(tensor, record.refusal);
    tensor.auxiliary = tensor.auxiliary || record.auxiliary;
  }
}

/// Refuse what is in no data file, or would change in a delegate only while the program itself uses it, too.
void Index::refuse_embedded() {
  std::unordered_set<const Tensor*> shared;
  for (const auto& delegate : delegates_) {
    for (const std::string& name : delegate->shared) {
      shared.insert(find_tensor(name));
    }
  }
  for (Tensor& tensor : tensor_memory_) {
    if (tensor.own_keys.empty() && (tensor.made_into.empty() || shared.count(&tensor) != 0)) {
      refuse(tensor, kEmbeddedRefusal);
    }
  }
}

/// Find out which tensors no state dict has, by all records of each.
void Index::find_auxiliary() {
  for (Tensor& tensor : tensor_memory_) {
    const auto& uses = tensor.made_into;
    if (!uses.empty()) {
      tensor.auxiliary = std::all_of(uses.begin(), uses.end(), [](const Record* record) { return record->auxiliary; });
    } else if (!tensor.own_keys.empty()) {
      tensor.auxiliary = false;
    }
  }
  std::vector<Tensor*> persistent;
  for (const auto& delegate : delegates_) {
    const TextSet transient(delegate->transient.begin(), delegate->transient.end());
    for (const SourceTensor& source : delegate->outside) {
      Tensor& tensor = *find_tensor(source.name);
      if (transient.count(source.name) == 0) {
        persistent.push_back(&tensor);
      } else if (tensor.made_into.empty()) {
        tensor.auxiliary = true;
      }
    }
  }
  for (Tensor* tensor : persistent) {
    if (!tensor->own_keys.empty()) {
      tensor->auxiliary = false;
    }
  }
}

/// Refuse what is stored in one blob with a tensor that cannot be changed.
void Index::refuse_companions() {
  std::vector<const Tensor*> waiting = refused_;
  std::unordered_set<const Record*> seen;
  while (!waiting.empty()) {
    const Tensor* refused = waiting.back();
    waiting.pop_back();
    for (const Record* record : refused->made_into) {
      if (!seen.insert(record).second) {
        continue;
      }
      for (const SourceTensor& source : record->sources) {
        Tensor& tensor = *find_tensor(source.name);
        if (tensor.refusal.empty()) {
          // reasons of reasons would grow with the square of a hostile file
          const bool is_long = refused->refusal.size() > kLongRefusal;
          refuse(
              tensor,
              is_long ? refused->refusal
                      : format(
                            "it is stored together with '{}', which cannot be changed: {}",
                            refused->name(),
                            refused->refusal));
          waiting.push_back(&tensor);
        }
      }
    }
  }
}

} // namespace blobstore::internal
