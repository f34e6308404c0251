#include "logical/updates.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <unordered_set>

#include "format/constants.h"
#include "logical/dim_order.h"
#include "logical/elementwise.h"
#include "logical/numbers.h"
#include "logical/reorder.h"
#include "logical/steps.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

std::string cannot(std::string_view name, const std::string& reason) {
  return format("'{}' cannot be updated: {}", name, reason);
}

[[noreturn]] void throw_two_values(std::string_view name, std::string_view canonical) {
  throw_error(ErrorKind::Update, "'{}' is another name of '{}', but was given other values", name, canonical);
}

/// Whether `constant_prop_pass()` computed a tensor from others, which the program then lacks.
bool is_propagated(std::string_view name) {
  return name.find("_prop_tensor_constant") != std::string_view::npos;
}

std::optional<Layout> layout_of(const Given& given) {
  Layout layout{given.value.scalar_type, {}, given.dim_order};
  for (const int64_t size : given.value.sizes) {
    if (size > INT32_MAX) {
      throw_error(
          ErrorKind::Layout, "'{}' has a shape that no blob can have: {}", given.name, to_string(given.value.sizes));
    }
    layout.sizes.push_back(static_cast<int32_t>(size));
  }
  return layout;
}

/// A tensor with its dimensions in the usual order. @throws Error UnsupportedData.
TensorView plain(const Given& given) {
  if (!given.opaque.empty()) {
    throw_error(ErrorKind::UnsupportedData, "expected a torch tensor or a numpy array, found {}", given.opaque);
  }
  if (!is_number(given.value.scalar_type)) {
    throw_error(ErrorKind::UnsupportedData, "weights of type {} are not supported", to_string(layout_of(given)));
  }
  return reorder(given.value, given.dim_order, row_major(given.dim_order.size()));
}

/// Whether two values for a key are equal; each is a tensor, or bytes.
bool is_same(const Given& one, const Given& other) {
  if (one.opaque.empty() && other.opaque.empty() && is_number(one.value.scalar_type) &&
      is_number(other.value.scalar_type)) {
    return same_tensors(plain(one), plain(other));
  }
  return one.value.nbytes == other.value.nbytes &&
      (one.value.nbytes == 0 || std::memcmp(one.value.data, other.value.data, one.value.nbytes) == 0);
}

std::string with_sizes(int8_t scalar_type, const std::vector<int64_t>& sizes) {
  return type_name(scalar_type) + to_string(sizes);
}

TensorView from_blob(const SourceBlob& blob) {
  const Layout& layout = **blob.layout;
  if (!is_number(layout.scalar_type)) {
    throw_error(ErrorKind::UnsupportedData, "weights of type {} are not supported", to_string(layout));
  }
  const TensorView view{layout.scalar_type, {layout.sizes.begin(), layout.sizes.end()}, blob.data, blob.size, nullptr};
  return reorder(view, layout.dim_order, row_major(layout.sizes.size()));
}

Names source_names(const Record& record) {
  Names names;
  for (const SourceTensor& source : record.sources) {
    names.push_back(source.name);
  }
  return names;
}

/// The order in which the blobs of an update are made.
int order_of(const Record& record) {
  if (record.auxiliary) {
    return 0;
  }
  return is_quantized_bias(record) ? 2 : 1;
}

/// Whether a loaded program has a tensor; without `in_use`, every tensor counts.
bool is_in_use(const Tensor& tensor, const NamesInUse* in_use) {
  bool used = in_use == nullptr;
  for (const std::string_view name : tensor.names) {
    used = used || in_use->count(std::string(name)) != 0;
  }
  return used;
}

} // namespace

Given given_of(const std::string& name, const executorch::aten::Tensor& tensor) {
  Given out;
  out.name = name;
  out.value.scalar_type = static_cast<int8_t>(tensor.scalar_type());
  out.value.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  out.value.data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  out.value.nbytes = tensor.nbytes();
  out.dim_order = dim_order_of(tensor);
  return out;
}

LogicalTensor Updates::describe(std::string_view name) const {
  const Tensor* tensor = index_.find(name);
  if (tensor == nullptr) {
    throw unknown(name);
  }
  LogicalTensor out;
  out.name = tensor->name();
  out.scalar_type = tensor->scalar_type;
  out.sizes = tensor->sizes;
  out.aliases.assign(tensor->names.begin() + 1, tensor->names.end());
  std::set<std::string> needs;
  out.keys = index_.keys_changed_with(*tensor);
  for (const Record* record : tensor->made_into) {
    for (const SourceTensor& source : record->sources) {
      needs.insert(index_.tensor_of(source).name());
    }
  }
  needs.erase(out.name);
  out.needs.assign(needs.begin(), needs.end());
  out.refusal = tensor->refusal;
  out.auxiliary = tensor->auxiliary;
  return out;
}

void Updates::check_names(const Names& names) const {
  std::string refused;
  for (const std::string_view name : names) {
    const Tensor* tensor = index_.find(name);
    if (tensor == nullptr && !source_.contains(name)) {
      throw unknown(name);
    }
    if (tensor != nullptr && !tensor->refusal.empty()) {
      refused += (refused.empty() ? "" : "; ") + cannot(name, tensor->refusal);
    }
  }
  if (!refused.empty()) {
    throw_error(ErrorKind::Update, "{}", refused);
  }
}

Changes Updates::changes(const std::vector<Given>& given, bool finite) const {
  Names names;
  for (const Given& one : given) {
    names.push_back(one.name);
  }
  check_names(names);
  std::vector<std::pair<std::string_view, const Given*>> direct;
  TextMap<size_t> by_key;
  std::vector<const Given*> logical;
  const auto change = [&](std::string_view key, const Given& one, const Tensor* tensor) {
    const auto [known, is_new] = by_key.emplace(key, direct.size());
    if (is_new) {
      direct.emplace_back(key, &one);
    } else if (tensor != nullptr && !is_same(*direct[known->second].second, one)) {
      throw_two_values(one.name, tensor->names.front());
    }
  };
  for (const Given& one : given) {
    const Tensor* tensor = index_.find(one.name);
    if (tensor == nullptr) {
      change(one.name, one, nullptr);
      continue;
    }
    for (const std::string_view key : tensor->own_keys) {
      change(key, one, tensor);
    }
    if (!tensor->made_into.empty()) {
      logical.push_back(&one);
    }
  }
  Changes changes;
  for (const auto& [key, one] : direct) {
    if (finite && one->opaque.empty() && !is_finite(one->value)) {
      throw_error(ErrorKind::Update, "'{}' has values that are not finite", key);
    }
    changes.blobs.push_back(direct_change(key, *one));
  }
  resolve(logical, finite, changes);
  return changes;
}

/// The change of one key; the data is put in the blob's order of dimensions.
NewBlob Updates::direct_change(std::string_view key, const Given& given) const {
  NewBlob out{std::string(key), given.value, std::nullopt, false};
  if (!given.opaque.empty()) {
    return out;
  }
  const std::optional<Layout> layout = layout_of(given);
  const std::optional<Layout>& own = *source_.find(key)->layout;
  if (!own && layout->scalar_type == kByte && layout->sizes.size() == 1) {
    return out; // opaque bytes in the form in which Python's readers return them
  }
  if (!own) {
    throw_error_in(
        ErrorKind::Layout, source_.name(), "key '{}' is opaque bytes, the new data is {}", key, to_string(layout));
  }
  out.has_layout = true;
  out.layout = layout;
  if (layout->scalar_type == own->scalar_type && layout->sizes == own->sizes) {
    out.bytes = reorder(given.value, given.dim_order, own->dim_order);
    out.layout = own;
  }
  return out;
}

void Updates::resolve(const std::vector<const Given*>& given, bool finite, Changes& changes) const {
  std::vector<const Tensor*> tensors;
  const Values values = values_of(given, finite, tensors);
  // scales first, because weights in the same update are quantized with them; then weights, because biases follow them
  std::multimap<int, const Record*> records;
  std::unordered_set<const Record*> seen;
  for (const Tensor* tensor : tensors) {
    for (const Record* record : tensor->made_into) {
      if (seen.insert(record).second) {
        records.emplace(order_of(*record), record);
      }
    }
  }
  Scales scales(index_, [&](const std::string& key) {
    changes.used.push_back({key, blob_bytes(key), std::nullopt, false});
    return changes.used.back().bytes;
  });
  for (const auto& [order, record] : records) {
    changes.blobs.push_back(make(*record, values, scales, changes.quantized));
    if (record->auxiliary) {
      scales.give(record->key, changes.blobs.back().bytes);
    }
  }
  for (const Record* bias : scales.follow()) {
    if (seen.count(bias) == 0) {
      changes.blobs.push_back(follow(*bias, scales, changes));
    }
  }
  for (const Scales::Computed& made : scales.computed()) {
    if (made.changed != 0) {
      changes.blobs.push_back({made.key, made.bytes, std::nullopt, false});
    }
  }
}

/// The integers of a bias that is not given, as its scales change.
NewBlob Updates::follow(const Record& bias, const Scales& scales, Changes& changes) const {
  const Step& step = bias.steps.back();
  changes.used.push_back({bias.key, blob_bytes(bias.key), std::nullopt, false});
  const auto before = scales_of(step, [&](const std::string& key) { return scales.stored(key); });
  const auto after = scales_of(step, [&](const std::string& key) { return scales.find(key); });
  TensorView made = rescale(changes.used.back().bytes, before, after);
  changes.quantized.push_back(
      {bias.sources[0].name, bias.key, made.nbytes / item_size(made.scalar_type), 0, scales.changed(step)});
  return {bias.key, std::move(made), std::nullopt, false};
}

/// A copy of a blob of groups of numbers of four bits; without data for any other.
TensorView Updates::packed_groups(const Record& record) const {
  const size_t steps = record.steps.size();
  const bool is_packed = steps >= 2 && record.steps[steps - 2].operation == Operation::QuantizeGroup &&
      record.steps[steps - 1].operation == Operation::PackInt4;
  if (!is_packed) {
    return {};
  }
  return blob_bytes(record.key);
}

/// Whether the scales of a step can be computed from new numbers: all that are quantized with them are given.
bool Updates::can_rescale(const Step& step, const Values& values) const {
  if (step.names.empty() || !index_.can_rescale(step.names[0])) {
    return false;
  }
  for (const Record* record : index_.quantized_with(step.names[0])) {
    for (const SourceTensor& source : record->sources) {
      const auto given = values.find(&index_.tensor_of(source));
      if (given == values.end() || !is_floating(given->second.scalar_type)) {
        return false;
      }
    }
  }
  return true;
}

/// Whether a blob has these bytes.
bool Updates::is_stored(const std::string& key, const TensorView& bytes) const {
  const std::shared_ptr<const void> held = source_.hold();
  const std::optional<SourceBlob> blob = source_.find(key);
  return blob && blob->size == bytes.nbytes &&
      (blob->size == 0 || std::memcmp(blob->data, bytes.data, blob->size) == 0);
}

/// The value that is given for each tensor, checked.
/// @param tensors gets them in the order of their values.
Updates::Values Updates::values_of(
    const std::vector<const Given*>& given, bool finite, std::vector<const Tensor*>& tensors) const {
  Values values;
  for (const Given* one : given) {
    const Tensor* tensor = index_.find(one->name);
    if (tensor == nullptr) {
      throw unknown(one->name);
    }
    TensorView value = take(*tensor, *one, finite);
    const auto known = values.find(tensor);
    if (known == values.end()) {
      values.emplace(tensor, std::move(value));
      tensors.push_back(tensor);
    } else if (!same_tensors(known->second, value)) {
      throw_two_values(one->name, tensor->names.front());
    }
  }
  return values;
}

/// The values that a blob is made of. @throws Error: one is missing or has a dtype that the blob cannot be made of.
std::vector<TensorView> Updates::sources_of(const Record& record, const Values& values) const {
  std::vector<const Tensor*> sources;
  std::vector<bool> has;
  for (const SourceTensor& source : record.sources) {
    sources.push_back(&index_.tensor_of(source));
    has.push_back(values.count(sources.back()) != 0);
  }
  check_complete(record, sources, has);
  std::vector<TensorView> found;
  for (size_t i = 0; i < sources.size(); ++i) {
    const SourceTensor& source = record.sources[i];
    found.push_back(values.at(sources[i]));
    if (!accepts(record, source, found.back().scalar_type)) {
      throw_error(
          ErrorKind::Layout,
          "'{}' is {}, the new one is {}",
          source.name,
          with_sizes(source.scalar_type, source.sizes),
          type_name(found.back().scalar_type));
    }
  }
  return found;
}

/// The new bytes of a blob.
NewBlob Updates::make(
    const Record& record, const Values& values, Scales& scales, std::vector<Quantized>& quantized) const {
  const std::vector<TensorView> sources = sources_of(record, values);
  const Lookup lookup = [&](const std::string& key) { return scales.find(key); };
  Quantized about{record.sources[0].name, record.key, 0, 0, 0};
  const Step* step = nullptr;
  bool is_computed = false;
  NewBlob made{
      record.key,
      lay_out(
          record,
          sources,
          lookup,
          [&](const Step& now, const TensorView& numbers) {
            step = &now;
            is_computed = scales.choose(now, numbers, can_rescale(now, values), packed_groups(record));
            about.numbers = count(numbers.sizes);
            about.clipped = beyond(now, numbers, lookup);
            about.rescaled = scales.changed(now);
          }),
      std::nullopt,
      false};
  if (step == nullptr) {
    return made;
  }
  // What gives the stored integers with the stored scales changes nothing, however these were found.
  if (is_computed && about.rescaled != 0) {
    const TensorView same = lay_out(record, sources, [&](const std::string& key) { return scales.stored(key); });
    if (is_stored(record.key, same)) {
      scales.keep(*step);
      about.rescaled = 0;
      made.bytes = same;
    }
  }
  if (about.clipped != 0 && about.rescaled == 0 && is_stored(record.key, made.bytes)) {
    about.clipped = 0;
  }
  quantized.push_back(std::move(about));
  return made;
}

void Updates::check(const Given& given) const {
  const Tensor* tensor = index_.find(given.name);
  if (tensor == nullptr) {
    throw unknown(given.name);
  }
  take(*tensor, given, false);
}

/// Check a value.
TensorView Updates::take(const Tensor& tensor, const Given& given, bool finite) const {
  TensorView value = plain(given);
  if (value.sizes != tensor.sizes) {
    throw_error(
        ErrorKind::Layout,
        "'{}' has shape {}, the new one has {}",
        given.name,
        to_string(tensor.sizes),
        to_string(value.sizes));
  }
  if (finite && !is_finite(value)) {
    throw_error(ErrorKind::Update, "'{}' has values that are not finite", given.name);
  }
  return value;
}

/// Check that all tensors that a blob is made of were given, and that the blob is there.
void Updates::check_complete(
    const Record& record, const std::vector<const Tensor*>& tensors, const std::vector<bool>& given) const {
  std::set<std::string_view> present;
  std::set<std::string_view> missing;
  for (size_t i = 0; i < tensors.size(); ++i) {
    (given[i] ? present : missing).insert(tensors[i]->names.front());
  }
  if (!missing.empty()) {
    throw_error(
        ErrorKind::Update,
        "{} cannot be updated without {}: the delegate has them combined in one blob, '{}'",
        quoted({present.begin(), present.end()}),
        quoted({missing.begin(), missing.end()}),
        record.key);
  }
  if (!source_.contains(record.key)) {
    throw_error(
        ErrorKind::KeyNotFound,
        "{}: blob '{}' of {} is in none of these data files",
        source_.name(),
        record.key,
        quoted(source_names(record)));
  }
}

/// A copy of the bytes of a blob, from one generation.
TensorView Updates::blob_bytes(const std::string& key) const {
  const std::optional<SourceBlob> blob = source_.find(key);
  if (!blob) {
    throw_error(ErrorKind::KeyNotFound, "{}: blob '{}' is in none of these data files", source_.name(), key);
  }
  const TensorView copy = make_tensor(kByte, {static_cast<int64_t>(blob->size)});
  const std::shared_ptr<const void> held = source_.hold();
  if (blob->size != 0) {
    std::memcpy(filling(copy), blob->data, blob->size);
  }
  return copy;
}

TensorView Updates::value(std::string_view name) const {
  const Tensor* tensor = index_.find(name);
  const Names keys = tensor != nullptr ? tensor->own_keys : Names{name};
  for (const std::string_view key : keys) {
    const std::optional<SourceBlob> blob = source_.find(key);
    if (blob && *blob->layout) {
      return from_blob(*blob);
    }
  }
  if (tensor != nullptr) {
    std::optional<Error> reason;
    for (const Record* record : tensor->made_into) {
      if (const std::optional<SourceBlob> blob = source_.find(record->key)) {
        try {
          return restore(*record, blob->data, blob->size);
        } catch (const Error& error) {
          reason = error;
        }
      }
    }
    if (reason) {
      throw *reason;
    }
  }
  throw unknown(name);
}

Names Updates::choose(const std::vector<Entry>& entries, bool strict, const NamesInUse* in_use) const {
  if (strict) {
    check_propagated(entries, in_use);
    check_frozen(in_use);
  }
  Names available;
  for (const Entry& entry : entries) {
    available.push_back(entry.name);
  }
  Names missing;
  Names chosen = choose_tensors(available, strict, in_use, missing);
  if (!missing.empty() && strict) {
    check_prefix(available, missing);
    std::string end = hint(available);
    end = end.empty() ? misspelt(available, missing) : end;
    throw_error(ErrorKind::Update, "the state dict lacks {}, which the program has{}", quoted(missing), end);
  }
  for (const std::string_view name : available) {
    if (index_.find(name) == nullptr && source_.contains(name)) {
      chosen.push_back(name);
    }
  }
  if (!available.empty() && chosen.empty()) {
    throw mismatch(available);
  }
  return chosen;
}

/// The names that are given of tensors of the programs.
/// @param missing gets those of tensors that are not given.
Names Updates::choose_tensors(const Names& available, bool strict, const NamesInUse* in_use, Names& missing) const {
  const TextSet has(available.begin(), available.end());
  Names chosen;
  std::string refused;
  for (const Tensor* tensor : index_.tensors()) {
    if (!tensor->refusal.empty() && (!strict || tensor->refusal == kStateRefusal)) {
      continue;
    }
    Names found;
    std::copy_if(tensor->names.begin(), tensor->names.end(), std::back_inserter(found), [&](std::string_view name) {
      return has.count(name) != 0;
    });
    if (!found.empty()) {
      chosen.insert(chosen.end(), found.begin(), found.end()); // their values must be equal
    } else if (tensor->auxiliary || !is_in_use(*tensor, in_use)) {
      continue;
    } else if (!tensor->refusal.empty() && tensor->refusal != kEmbeddedRefusal) {
      refused += (refused.empty() ? "" : "; ") + cannot(tensor->names.front(), tensor->refusal);
    } else if (!tensor->made_into.empty() || !tensor->own_keys.empty()) {
      missing.push_back(tensor->names.front());
    }
  }
  if (!refused.empty()) {
    throw_error(ErrorKind::Update, "{}", refused);
  }
  return chosen;
}

/// Refuse weights that lost their names when they were quantized.
void Updates::check_frozen(const NamesInUse* in_use) const {
  Names frozen;
  for (const Tensor* tensor : index_.refused()) {
    if (tensor->names.front().rfind("_frozen_param", 0) == 0 && is_in_use(*tensor, in_use)) {
      frozen.push_back(tensor->names.front());
    }
  }
  if (!frozen.empty()) {
    throw_error(ErrorKind::Update, "{} cannot be updated: {}", quoted(frozen), index_.find(frozen[0])->refusal);
  }
}

/// Refuse tensors that the program may only have computed others from, before it was lowered.
void Updates::check_propagated(const std::vector<Entry>& entries, const NamesInUse* in_use) const {
  Names computed;
  TextSet seen;
  const auto note = [&](std::string_view name) {
    if (is_propagated(name) && seen.insert(name).second) {
      computed.push_back(name);
    }
  };
  for (const Tensor* tensor : index_.refused()) {
    if (is_in_use(*tensor, in_use)) {
      note(tensor->names.front());
    }
  }
  for (const std::string_view key : plain_keys()) {
    if (in_use == nullptr || in_use->count(std::string(key)) != 0) {
      note(key);
    }
  }
  Names gone;
  for (const Entry& entry : entries) {
    if (entry.is_floating && !knows(entry.name)) {
      gone.push_back(entry.name);
    }
  }
  if (!computed.empty() && !gone.empty()) {
    throw_error(
        ErrorKind::Update,
        "{}: no program has {}, and {} may have been computed from them: lower the model without constant_prop_pass()",
        source_.name(),
        some(gone),
        some(computed));
  }
}

void Updates::check_stored(const std::string& origin) const {
  const std::shared_ptr<const void> held = source_.hold();
  for (const Record* record : index_.records()) {
    const std::optional<SourceBlob> blob = source_.find(record->key);
    std::vector<TensorView> values;
    for (const SourceTensor& source : record->sources) {
      if (!blob || !index_.tensor_of(source).refusal.empty()) {
        break;
      }
      if (std::optional<TensorView> value = stored(source)) {
        values.push_back(std::move(*value));
      }
    }
    if (!blob || values.size() != record->sources.size()) {
      continue;
    }
    const TensorView made = lay_out(*record, values, [&](const std::string& key) { return blob_bytes(key); });
    if (made.nbytes != blob->size || (blob->size != 0 && std::memcmp(made.data, blob->data, blob->size) != 0)) {
      throw_error(
          ErrorKind::KeyConflict,
          "{}: a method that is delegated and one that is not have different tensors with the name {}: export the "
          "methods from modules that use different names (docs/howto/lowering.md)",
          origin,
          quoted(source_names(*record)));
    }
  }
}

/// The tensor that a data file has under its own key, if its dtype is supported.
std::optional<TensorView> Updates::stored(const SourceTensor& source) const {
  for (const std::string_view key : index_.tensor_of(source).own_keys) {
    const std::optional<SourceBlob> blob = source_.find(key);
    if (blob && *blob->layout && (*blob->layout)->scalar_type == source.scalar_type) {
      return from_blob(*blob);
    }
  }
  return std::nullopt;
}

Error Updates::mismatch(const Names& given) const {
  std::string refused;
  for (const std::string_view name : given) {
    if (const Tensor* tensor = index_.find(name); tensor != nullptr && !tensor->refusal.empty()) {
      refused += format("{}{}': {}", refused.empty() ? " ('" : "; '", name, tensor->refusal);
    }
  }
  Names own;
  for (const Tensor* tensor : index_.tensors()) {
    if (tensor->refusal.empty()) {
      own.push_back(tensor->names.front());
    }
  }
  if (own.empty()) {
    own = plain_keys();
  }
  std::string end = hint(given);
  if (end.empty() && !given.empty()) {
    end = suggest(given[0], own);
  }
  return Error(
      ErrorKind::Update,
      format(
          "{}: none of the tensors given can be updated{}: found {}, the programs have {}{}",
          source_.name(),
          refused.empty() ? "" : format("{})", refused),
          some(given),
          own.empty() ? "none with a name" : some(own),
          end));
}

Error Updates::unknown(std::string_view name) const {
  const std::string& where = source_.name();
  const std::string which = format("'{}'", name);
  std::string reason;
  if (index_.records().empty()) {
    bool hashes = false;
    for (size_t i = 0; i < source_.size() && !hashes; ++i) {
      hashes = is_hash_key(source_.key(i));
    }
    reason = hashes ? format(
                          "{} cannot be updated by name: the keys of the weights are hashes of their contents, as in "
                          "ExecuTorch's own lowering; lower the model with blobstore.lowering.BlobStorePartitioner",
                          which)
                    : format("no key {}, and no records of tensors", which);
  } else {
    reason = format("no key and no tensor {}", which);
  }
  std::string end = hint({name});
  if (end.empty()) {
    Names known(index_.names());
    const Names keys = plain_keys();
    known.insert(known.end(), keys.begin(), keys.end());
    end = suggest(name, known);
  }
  return Error(ErrorKind::KeyNotFound, format("{}: {}{}", where, reason, end));
}

/// Keys that may be names of tensors.
Names Updates::plain_keys() const {
  Names keys;
  for (size_t i = 0; i < source_.size(); ++i) {
    const std::string_view key = source_.key(i);
    if (key.rfind(kKeyPrefix, 0) != 0 && key.find('@') == std::string_view::npos) {
      keys.push_back(key);
    }
  }
  return keys;
}

/// The names of tensors and the keys that may be names, each once.
Names Updates::known_names() const {
  Names known;
  TextSet seen;
  for (const Names& names : {index_.names(), plain_keys()}) {
    std::copy_if(names.begin(), names.end(), std::back_inserter(known), [&](std::string_view name) {
      return seen.insert(name).second;
    });
  }
  return known;
}

Names Updates::similar(std::string_view name) const {
  std::string plain; // without what data parallelism, compilation and outer modules insert
  for (size_t start = 0; start <= name.size();) {
    const size_t stop = std::min(name.find('.', start), name.size());
    const std::string_view part = name.substr(start, stop - start);
    if (part != "module" && part != "model" && part != "_orig_mod") {
      plain += format("{}{}", plain.empty() ? "" : ".", part);
    }
    start = stop + 1;
  }
  const auto ends_with = [](std::string_view text, std::string_view end) {
    return text.size() > end.size() && text[text.size() - end.size() - 1] == '.' &&
        text.substr(text.size() - end.size()) == end;
  };
  Names found;
  for (const std::string_view other : known_names()) {
    if (other != name && (ends_with(other, name) || ends_with(name, other) || other == plain)) {
      found.push_back(other);
    }
  }
  return found;
}

/// The end of a message: names that an unknown name may stand for.
std::string Updates::hint(const Names& names) const {
  for (const std::string_view name : names) {
    if (!knows(name)) {
      if (const Names found = similar(name); !found.empty()) {
        return format("; '{}' may be {} here", name, some(found, "or"));
      }
    }
  }
  return "";
}

/// Refuse names that all have the prefix of a wrapper, such as `module.`, with one line instead of every name.
void Updates::check_prefix(const Names& names, const Names& missing) const {
  const std::string_view first = names.empty() ? std::string_view() : names.front();
  const TextSet given(names.begin(), names.end());
  for (size_t dot = first.find('.'); dot != std::string_view::npos; dot = first.find('.', dot + 1)) {
    const std::string_view prefix = first.substr(0, dot + 1);
    bool all = true;
    for (const std::string_view name : missing) {
      all = all && given.count(std::string(prefix).append(name)) != 0;
    }
    if (all) {
      throw_error(
          ErrorKind::Update,
          "{}: the names in the state dict have the prefix '{}', which the program's names lack{}",
          source_.name(),
          prefix,
          hint(names));
    }
  }
}

/// Which unknown name may have been meant for a missing one.
std::string Updates::misspelt(const Names& names, const Names& missing) const {
  for (const std::string_view name : names) {
    if (!knows(name)) {
      if (const Names found = near(name, missing); !found.empty()) {
        return format("; '{}' may be {} here", name, some(found, "or"));
      }
    }
  }
  return "";
}

} // namespace blobstore::internal
