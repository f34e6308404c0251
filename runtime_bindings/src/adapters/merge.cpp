// Merging adapters into the weights of a cache, and taking them out again.

#include "adapters/merge.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <set>

#include <blobstore/reading.h>

#include "adapters/adapter_file.h"
#include "adapters/combine.h"
#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "adapters/on_cache.h"
#include "adapters/peft_names.h"
#include "adapters/product.h"
#include "logical/numbers.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {

using namespace internal;

struct MergedAdapter::Impl {
  std::shared_ptr<BlobCache> cache;
  std::shared_ptr<AdaptersOfCache> state;
  std::vector<std::string> weights;
  uint64_t generation = 0;
  std::map<std::string, Digest> after; // of the blobs that changed
  std::vector<std::string> counted; // of these, those whose change the state knows as a merge
  std::optional<std::vector<std::pair<std::string, std::vector<uint8_t>>>> before; // empty if reverting restores them
  std::atomic<bool> undone{false}; // this and `before` change in the state's turn
};

namespace internal BLOBSTORE_HIDDEN {
namespace {

/// A copy of a tensor in float32 or float64.
TensorView widened(const TensorView& tensor, int8_t wide) {
  const TensorView copy = make_tensor(wide, tensor.sizes);
  const uint64_t numbers = count(tensor.sizes);
  if (wide == kFloat) {
    to_floats(tensor.scalar_type, tensor.data, numbers, reinterpret_cast<float*>(filling(copy)));
  } else if (numbers > 0) {
    std::memcpy(filling(copy), cast(tensor, wide).data, copy.nbytes);
  }
  return copy;
}

} // namespace

/// The modules whose weights an index has, and the rows of these.
std::map<std::string, int64_t> rows_of_modules(const Index& index) {
  std::map<std::string, int64_t> rows;
  for (const NamedTensor& tensor : named_tensors(index)) {
    if (tensor.sizes.size() != 2) {
      continue;
    }
    std::vector<std::string> names = tensor.aliases;
    names.push_back(tensor.name);
    for (const std::string& name : names) {
      for (std::string& module : modules_of_weight(name)) {
        rows.emplace(std::move(module), tensor.sizes[0]);
      }
    }
  }
  return rows;
}

/// One merge, step by step.
class Merge {
 public:
  Merge(const CacheTensors& tensors, std::string origin, const NamedViews& adapter, const MergeChoices& options)
      : tensors_(tensors), cache_(tensors.cache()), origin_(std::move(origin)), adapter_(adapter), options_(options) {}

  std::unique_ptr<MergedAdapter> run(double recorded_scale) {
    const double factor =
        check_scale(options_.alpha, "alpha") * check_scale(options_.scale ? *options_.scale : recorded_scale, "scale");
    const std::vector<LoraPair> pairs = checked_pairs();
    auto merged = std::make_unique<MergedAdapter::Impl>();
    merged->cache = cache_;
    merged->state = AdaptersOfCache::of(cache_);
    const auto turn = merged->state->take_turn(*cache_);
    return with_origin(origin_, [&] {
      read(pairs, *merged);
      NamedViews values;
      for (size_t i = 0; i < pairs.size(); ++i) {
        add(pairs[i], factor, weights_[i]);
        values.emplace_back(weights_[i].name, cast(weights_[i].total, weights_[i].stored_type));
      }
      merged->generation = commit(tensors_, values);
      merged->after = digests_of(*cache_, keys_);
      for (const auto& [key, after] : merged->after) {
        if (merged->state->add_merged(key, counts_as_.at(key), after)) {
          merged->counted.push_back(key);
        }
      }
      return std::unique_ptr<MergedAdapter>(new MergedAdapter(std::move(merged)));
    });
  }

 private:
  struct Weight {
    std::string name;
    int8_t stored_type = 0;
    TensorView total; // in float32 or float64
  };

  /// The pairs among the tensors, which must all belong to one.
  std::vector<LoraPair> checked_pairs() const {
    std::vector<LoraPair> pairs = only_pairs(shapes_of(adapter_), origin_, "there is no weight to merge them into");
    if (pairs.empty()) {
      throw no_adapter(origin_);
    }
    return pairs;
  }

  /// Copy the weights, and the bytes that undoing needs, all of one generation.
  void read(const std::vector<LoraPair>& pairs, MergedAdapter::Impl& merged) {
    const BlobCache::Reading reading(*cache_);
    for (const LoraPair& pair : pairs) {
      std::string name = find_weight(pair);
      if (std::find(merged.weights.begin(), merged.weights.end(), name) != merged.weights.end()) {
        throw_error(ErrorKind::Adapter, "two modules have the weight '{}'", name);
      }
      const TensorView start = start_of(name);
      check_shape(pair, name, start);
      const Tensor* known = index().find(name);
      const int8_t stored = known != nullptr ? known->scalar_type : start.scalar_type;
      weights_.push_back({name, stored, widened(start, start.scalar_type == kDouble ? kDouble : kFloat)});
      add_keys(name);
      merged.weights.push_back(std::move(name));
    }
    merged.before = before();
    for (const std::string& key : keys_) {
      counts_as_.emplace(key, merged.state->digest_now(*cache_, cache_->at(key)));
    }
  }

  /// The name of the weight that a pair adapts.
  std::string find_weight(const LoraPair& pair) const {
    const auto given = options_.names.find(pair.module);
    const std::vector<std::string> candidates =
        given != options_.names.end() ? std::vector<std::string>{given->second} : weight_names(pair.module);
    for (const std::string& name : candidates) {
      if (const Tensor* tensor = index().find(name)) {
        check_tied(pair, name, *tensor);
        return tensor->name(); // tied weights are one weight, under any of their names
      }
      if (cache_->find(name) != nullptr) {
        return name;
      }
    }
    throw_error(
        ErrorKind::KeyNotFound,
        "module '{}' has no weight in {}: {}",
        pair.module,
        cache_->name(),
        quoted_names(candidates));
  }

  /// @throws Error Adapter: the adapter was trained for one use of a weight that has several.
  void check_tied(const LoraPair& pair, const std::string& name, const Tensor& tensor) const {
    std::vector<std::string> others;
    for (const std::string_view other : tensor.names) {
      const auto modules = modules_of_weight(std::string(other));
      const bool is_adapted = std::find(modules.begin(), modules.end(), pair.module) != modules.end();
      if (other != name && !is_adapted) {
        others.emplace_back(other);
      }
    }
    if (!others.empty() && !options_.tied) {
      throw_error(
          ErrorKind::Adapter,
          "the model uses '{}' also as {}, which the adapter would change, too; allow that with `tied`",
          name,
          quoted_names(others));
    }
  }

  /// The weight that the adapter is added to: one of the caller's, or a view of the cache's memory.
  TensorView start_of(const std::string& name) const {
    std::vector<std::string_view> names{name};
    if (const Tensor* tensor = index().find(name)) {
      names.insert(names.end(), tensor->names.begin(), tensor->names.end());
    }
    for (const std::string_view one : names) {
      for (const auto& [given, value] : options_.weights) {
        if (given == one) {
          return value;
        }
      }
    }
    std::string reason;
    try {
      TensorView value = tensors_.updates().value(name);
      if (is_floating(value.scalar_type)) {
        return value;
      }
      reason = format("it is stored as {}", type_name(value.scalar_type));
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::Update) {
        throw;
      }
      reason = error.what();
    }
    throw_error(
        ErrorKind::Update,
        "an adapter cannot be merged into '{}' as it is: {}; give its float tensor in `weights`",
        name,
        reason);
  }

  void check_shape(const LoraPair& pair, const std::string& name, const TensorView& weight) const {
    const std::vector<int64_t> product{pair.out_features, pair.in_features};
    if (weight.sizes != product) {
      throw_error_in(
          ErrorKind::Layout,
          origin_,
          "'{}' is {}, but '{}' and '{}' make {}",
          name,
          to_string(weight.sizes),
          pair.b,
          pair.a,
          to_string(product));
    }
  }

  /// Note the blobs that an update of a name changes.
  void add_keys(const std::string& name) {
    for (std::string& key : keys_of(tensors_, name)) {
      if (cache_->find(key) != nullptr && std::find(keys_.begin(), keys_.end(), key) == keys_.end()) {
        keys_.push_back(std::move(key));
      }
    }
  }

  /// Copies of the blobs; empty if none of them is dirty, so that reverting restores them.
  std::optional<std::vector<std::pair<std::string, std::vector<uint8_t>>>> before() const {
    const std::vector<std::string> dirty = cache_->dirty();
    const std::set<std::string> known(dirty.begin(), dirty.end());
    if (cache_->mode() != BlobCache::Mode::Shared &&
        std::none_of(keys_.begin(), keys_.end(), [&](const std::string& key) { return known.count(key) != 0; })) {
      return std::nullopt;
    }
    std::vector<std::pair<std::string, std::vector<uint8_t>>> copies;
    for (const std::string& key : keys_) {
      const Blob& blob = cache_->at(key);
      copies.emplace_back(key, std::vector<uint8_t>(blob.data, blob.data + blob.size));
    }
    return copies;
  }

  /// Add the product of a pair to a weight, not yet rounded to the weight's dtype.
  void add(const LoraPair& pair, double factor, Weight& weight) const {
    const int8_t wide = weight.total.scalar_type;
    const TensorView b = widened(tensor(pair.b), wide);
    const TensorView a = widened(tensor(pair.a), wide);
    const auto add_as = [&](auto number) {
      using Number = decltype(number);
      add_product(
          reinterpret_cast<Number*>(filling(weight.total)),
          static_cast<Number>(factor),
          reinterpret_cast<const Number*>(b.data),
          reinterpret_cast<const Number*>(a.data),
          static_cast<size_t>(pair.out_features),
          static_cast<size_t>(pair.rank),
          static_cast<size_t>(pair.in_features));
    };
    wide == kDouble ? add_as(double{}) : add_as(float{});
  }

  const Index& index() const { return tensors_.updates().index(); }

  const TensorView& tensor(const std::string& name) const {
    const auto found =
        std::find_if(adapter_.begin(), adapter_.end(), [&](const auto& one) { return one.first == name; });
    return found->second;
  }

  const CacheTensors& tensors_;
  const std::shared_ptr<BlobCache> cache_;
  const std::string origin_;
  const NamedViews& adapter_;
  const MergeChoices& options_;
  std::vector<Weight> weights_; // one for each pair
  std::vector<std::string> keys_; // of the blobs that are made of them
  std::map<std::string, Digest> counts_as_; // their digests without what was merged
};

} // namespace internal BLOBSTORE_HIDDEN

MergedAdapter::MergedAdapter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MergedAdapter::~MergedAdapter() = default;

const std::shared_ptr<BlobCache>& MergedAdapter::cache() const {
  return impl_->cache;
}

const std::vector<std::string>& MergedAdapter::weights() const {
  return impl_->weights;
}

uint64_t MergedAdapter::generation() const {
  return impl_->generation;
}

bool MergedAdapter::undone() const {
  return impl_->undone;
}

uint64_t MergedAdapter::undo() {
  BlobCache& cache = *impl_->cache;
  const auto turn = impl_->state->take_turn(cache);
  if (impl_->undone) {
    throw_error_in(
        ErrorKind::Adapter, cache.name(), "the adapter was already taken out of {}", quoted_names(impl_->weights));
  }
  if (const auto changed = changed_since(cache, impl_->after); !changed.empty()) {
    throw_error_in(
        ErrorKind::Adapter,
        cache.name(),
        "{} changed after the adapter was merged in generation {}; undo first what was merged later, or revert",
        quoted_names(changed),
        impl_->generation);
  }
  uint64_t generation = 0;
  if (impl_->before) {
    std::vector<Change> changes;
    for (const auto& [key, bytes] : *impl_->before) {
      changes.push_back({key, bytes.data(), bytes.size()});
    }
    generation = cache.update(changes);
  } else {
    std::vector<std::string> keys;
    for (const auto& [key, found] : impl_->after) {
      keys.push_back(key);
    }
    generation = cache.revert(keys);
  }
  for (const std::string& key : impl_->counted) {
    impl_->state->remove_merged(key, impl_->after.at(key));
  }
  impl_->undone = true;
  impl_->before.reset();
  return generation;
}

namespace internal BLOBSTORE_HIDDEN {

std::unique_ptr<MergedAdapter> merge_adapter(
    const CacheTensors& tensors, const std::string& path, const MergeChoices& choices) {
  const std::shared_ptr<BlobCache>& cache = tensors.cache();
  cache->check_open();
  std::shared_ptr<const Adapter> adapter = Adapter::read(path);
  {
    const auto state = AdaptersOfCache::of(cache);
    const auto turn = state->take_turn(*cache);
    const auto known = state->known(tensors);
    if (AdapterAccess::impl(*adapter).peft) {
      adapter = adapter_for(
          *adapter, {cache->name(), rows_of_modules(tensors.updates().index()), known->head_dim, choices.names});
    } else {
      check_foundation(tensors, *known, *adapter);
    }
  }
  raise_first(adapter->problems());
  NamedViews values;
  for (const NamedTensor& tensor : adapter->tensors()) {
    const TensorView value = AdapterAccess::value(*adapter, tensor.name);
    const double factor = AdapterAccess::impl(*adapter).factor(tensor.name);
    const int8_t wide = value.scalar_type == kDouble ? kDouble : kFloat;
    values.emplace_back(tensor.name, factor == 1 ? value : scaled(value, factor, wide));
  }
  return Merge(tensors, path, values, choices).run(adapter->scale().value_or(1));
}

std::unique_ptr<MergedAdapter> merge_adapter(
    const CacheTensors& tensors, const NamedViews& adapter, const MergeChoices& choices) {
  tensors.cache()->check_open();
  return Merge(tensors, "the adapter", adapter, choices).run(1);
}

} // namespace internal BLOBSTORE_HIDDEN

namespace {

MergeChoices choices_of(const MergeOptions& options) {
  return {options.alpha, options.scale, options.names, views_of(options.weights), options.tied};
}

} // namespace

std::unique_ptr<MergedAdapter> merge_adapter(
    const LogicalTensors& tensors, const std::string& path, const MergeOptions& options) {
  return internal::merge_adapter(TensorsAccess::of(tensors), path, choices_of(options));
}

std::unique_ptr<MergedAdapter> merge_adapter(
    const LogicalTensors& tensors, const StateDict& adapter, const MergeOptions& options) {
  return internal::merge_adapter(TensorsAccess::of(tensors), views_of(adapter), choices_of(options));
}

} // namespace blobstore
