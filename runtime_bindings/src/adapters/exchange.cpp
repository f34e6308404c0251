// Exchanging the adapter of a cache, and changing its strength, while programs run.

#include "adapters/exchange.h"

#include <algorithm>
#include <set>

#include "adapters/adapter_file.h"
#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "adapters/on_cache.h"
#include "logical/numbers.h"
#include "os/text.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

/// A tensor times a factor, rounded once.
TensorView scaled(const TensorView& tensor, double factor) {
  if (factor == 1) {
    return tensor;
  }
  const uint64_t numbers = count(tensor.sizes);
  if (tensor.scalar_type == kDouble) {
    const TensorView product = make_tensor(kDouble, tensor.sizes);
    for (uint64_t i = 0; i < numbers; ++i) {
      store(filling(product) + 8 * i, factor * load<double>(tensor.data + 8 * i));
    }
    return product;
  }
  const TensorView product = make_tensor(kFloat, tensor.sizes);
  auto* data = reinterpret_cast<float*>(filling(product));
  to_floats(tensor.scalar_type, tensor.data, numbers, data);
  const auto narrow = static_cast<float>(factor);
  std::transform(data, data + numbers, data, [narrow](float number) { return number * narrow; });
  return cast(product, tensor.scalar_type);
}

/// The factor for `lora_b` that makes up for the scale in the program.
double factor_for(
    const BlobCache& cache, const KnownOfCache& known, const Adapter& adapter, std::optional<double> program_scale) {
  if (!adapter.scale()) {
    return 1;
  }
  if (program_scale) {
    if (check_scale(*program_scale, "program_scale") == 0) {
      throw_error(ErrorKind::Adapter, "program_scale is 0, so no adapter has an effect on this program");
    }
    return *adapter.scale() / *program_scale;
  }
  std::string have;
  bool differs = false;
  for (const double scale : known.scales) {
    have += (have.empty() ? "" : ", ") + number_text(scale);
    differs = differs || scale != *adapter.scale();
  }
  if (differs) {
    throw_error_in(
        ErrorKind::Adapter,
        adapter.path(),
        "its scale is {}, that of the adapter in {} is {}; give the factor of the program as program_scale=",
        number_text(*adapter.scale()),
        cache.name(),
        have);
  }
  return 1;
}

/// The tensors of an adapter by name. With `halves`, only its lora_b.
/// @throws Error Update: it is stored quantized.
NamedViews values_of(const Adapter& adapter, double factor, bool halves) {
  std::set<std::string> b;
  for (const LoraPair& pair : adapter.pairs()) {
    b.insert(pair.b);
  }
  NamedViews values;
  for (const NamedTensor& tensor : adapter.tensors()) {
    const bool is_half = b.count(tensor.name) != 0;
    if (is_half || !halves) {
      const TensorView value = AdapterAccess::value(adapter, tensor.name);
      values.emplace_back(tensor.name, is_half ? scaled(value, factor) : value);
    }
  }
  return values;
}

/// The blobs of an adapter that is stored quantized.
std::vector<Change> stored_in(const PtdFile& file) {
  std::vector<Change> changes;
  for (size_t i = 0; i < file.size(); ++i) {
    if (is_content(file.key(i))) {
      const SourceBlob blob = file.blob(i);
      changes.push_back({file.entry(i).key, blob.data, blob.size});
    }
  }
  return changes;
}

/// @throws Error Adapter: the programs have LoRA tensors that the adapter lacks.
void check_complete(const CacheTensors& tensors, const KnownOfCache& known, const Adapter& adapter) {
  std::set<std::string> missing = known.lora;
  for (const NamedTensor& tensor : adapter.tensors()) {
    const Tensor* known_as = tensors.updates().index().find(tensor.name);
    missing.erase(known_as != nullptr ? known_as->name() : tensor.name);
  }
  if (!missing.empty()) {
    throw_error_in(
        ErrorKind::Adapter,
        adapter.path(),
        "lacks {}, so {} would keep those of another adapter",
        quoted_names({missing.begin(), missing.end()}),
        tensors.cache()->name());
  }
}

/// Commit tensors, or, if the adapter is stored quantized, its blobs.
uint64_t commit_adapter(const CacheTensors& tensors, const Adapter& adapter, double factor) {
  NamedViews values;
  try {
    values = values_of(adapter, factor, /*halves=*/false);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Update || factor != 1) {
      throw;
    }
    return tensors.cache()->update(stored_in(AdapterAccess::impl(adapter).file));
  }
  return commit(tensors, values);
}

/// The digests of the blobs that are made of an adapter's tensors.
std::map<std::string, Digest> digests_of_adapter(const CacheTensors& tensors, const Adapter& adapter) {
  std::vector<std::string> keys;
  for (const NamedTensor& tensor : adapter.tensors()) {
    const std::vector<std::string> of_tensor = keys_of(tensors, tensor.name);
    keys.insert(keys.end(), of_tensor.begin(), of_tensor.end());
  }
  return digests_of(*tensors.cache(), keys);
}

} // namespace

uint64_t load_adapter(const CacheTensors& tensors, const std::string& path, const AdapterOptions& options) {
  const std::shared_ptr<BlobCache>& cache = tensors.cache();
  cache->check_open();
  check_scale(options.strength, "strength");
  const std::shared_ptr<const Adapter> adapter = Adapter::read(path);
  const auto state = AdaptersOfCache::of(cache);
  const auto turn = state->take_turn(*cache);
  const auto known = state->known(tensors);
  check_foundation(*cache, *known, *adapter);
  raise_first(AdapterAccess::impl(*adapter).unpaired); // the update itself refuses infinities and NaN
  auto loaded = std::make_shared<LoadedAdapter>();
  loaded->adapter = adapter;
  loaded->factor = factor_for(*cache, *known, *adapter, options.program_scale);
  check_complete(tensors, *known, *adapter);
  const uint64_t generation =
      with_origin(path, [&] { return commit_adapter(tensors, *adapter, loaded->factor * options.strength); });
  loaded->after = digests_of_adapter(tensors, *adapter);
  state->set_loaded(std::move(loaded));
  return generation;
}

uint64_t set_adapter_strength(const CacheTensors& tensors, double strength) {
  const std::shared_ptr<BlobCache>& cache = tensors.cache();
  cache->check_open();
  check_scale(strength, "strength");
  const auto state = AdaptersOfCache::of(cache);
  const auto turn = state->take_turn(*cache);
  const auto before = state->loaded();
  if (!before) {
    throw_error_in(ErrorKind::Adapter, cache->name(), "no adapter was loaded with load_adapter()");
  }
  const Adapter& adapter = *before->adapter;
  if (const auto changed = changed_since(*cache, before->after); !changed.empty()) {
    throw_error_in(
        ErrorKind::Adapter,
        cache->name(),
        "{} changed after {} was loaded; load an adapter first",
        quoted_names(changed),
        adapter.path());
  }
  AdapterAccess::impl(adapter).file.verify();
  auto loaded = std::make_shared<LoadedAdapter>(*before);
  const uint64_t generation = with_origin(
      adapter.path(), [&] { return commit(tensors, values_of(adapter, before->factor * strength, /*halves=*/true)); });
  loaded->after = digests_of_adapter(tensors, adapter);
  state->set_loaded(std::move(loaded));
  return generation;
}

} // namespace blobstore::internal

namespace blobstore {

uint64_t load_adapter(const LogicalTensors& tensors, const std::string& path, const AdapterOptions& options) {
  return internal::load_adapter(internal::TensorsAccess::of(tensors), path, options);
}

uint64_t set_adapter_strength(const LogicalTensors& tensors, double strength) {
  return internal::set_adapter_strength(internal::TensorsAccess::of(tensors), strength);
}

} // namespace blobstore
