// Exchanging the adapter of a cache, and changing its strength, while programs run.

#include "adapters/exchange.h"

#include <algorithm>
#include <set>

#include "adapters/adapter_file.h"
#include "adapters/combine.h"
#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "adapters/on_cache.h"
#include "adapters/peft_names.h"
#include "format/constants.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// @throws Error Adapter: nothing tells the factor of the programs, and the adapter need not have been trained with it.
void check_known_scale(const BlobCache& cache, const KnownOfCache& known, const Adapter& adapter) {
  const bool from_peft = AdapterAccess::impl(adapter).peft != nullptr || adapter.metadata().count(kPeftKey) != 0;
  if (known.scales.empty() && adapter.scale() && from_peft) {
    throw_error_in(
        ErrorKind::Adapter,
        adapter.path(),
        "its scale is {}, and no file of {} records that of the programs; give the factor of the program as "
        "`program_scale`",
        number_text(*adapter.scale()),
        cache.name());
  }
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
  check_known_scale(cache, known, adapter);
  if (std::any_of(known.scales.begin(), known.scales.end(), [&](double scale) { return scale != *adapter.scale(); })) {
    throw_error_in(
        ErrorKind::Adapter,
        adapter.path(),
        "its scale is {}, that of the adapter in {} is {}; give the factor of the program as `program_scale`",
        number_text(*adapter.scale()),
        cache.name(),
        joined(known.scales, ", ", number_text));
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
      values.emplace_back(tensor.name, is_half ? scaled(value, factor, value.scalar_type) : value);
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
  std::set<std::string> missing;
  for (const NamedTensor& tensor : known.lora) {
    missing.insert(tensor.name);
  }
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
    return tensors.cache()->update(stored_in(AdapterAccess::impl(adapter).data_file()));
  }
  return commit(tensors, values);
}

/// Commit new weights of the foundation and tensors of an adapter for it.
/// @param values the tensors. @param adapter compared with the new foundation, if it records its own.
uint64_t commit_with_fine_tune(
    const CacheTensors& tensors, const NamedViews& values, const Adapter& adapter, const StateDict& fine_tune) {
  const Index& index = tensors.updates().index();
  const auto name_of = [&](const std::string& name) {
    const Tensor* const tensor = index.find(name);
    return tensor != nullptr ? tensor->name() : name;
  };
  std::vector<Given> given = all_given(values);
  std::set<std::string> of_adapter;
  for (const Given& one : given) {
    of_adapter.insert(name_of(one.name));
  }
  const std::vector<Given> all_of_adapter = given;
  for (const auto& [name, tensor] : fine_tune) {
    if (tensor == nullptr) {
      throw_error(ErrorKind::UnsupportedData, "'{}' is no tensor", name);
    }
    if (!is_lora(name) && of_adapter.count(name_of(name)) == 0) {
      given.push_back(given_of(name, *tensor));
    }
  }
  tensors.check_reach(given, /*whole=*/true);
  given = tensors.choose(given, /*strict=*/true);
  for (const Given& one : all_of_adapter) { // what the programs lack must not be left out, as of a state dict
    if (std::none_of(given.begin(), given.end(), [&](const Given& other) { return other.name == one.name; })) {
      given.push_back(one);
    }
  }
  const BlobCache& cache = *tensors.cache();
  std::map<std::string, Digest> digests;
  const Changes changes = tensors.updates().changes(given, /*finite=*/true);
  bool fits = true; // otherwise the update says what does not
  for (const NewBlob& blob : changes.blobs) {
    const Blob* const old = cache.find(blob.key);
    fits = fits && old != nullptr && old->size == blob.bytes.nbytes && (!blob.has_layout || old->layout == blob.layout);
    digests.emplace(blob.key, digest(blob.bytes.data, blob.bytes.nbytes));
  }
  if (fits && !AdapterAccess::impl(adapter).peft) {
    check_foundation(tensors, *AdaptersOfCache::of(tensors.cache())->known(tensors), adapter, digests);
  }
  return tensors.update(given, /*finite=*/true, /*strict=*/true);
}

/// The factor that the programs multiply a product with.
/// @throws Error Adapter: it is not known.
double scale_of_programs(
    const BlobCache& cache,
    const KnownOfCache& known,
    const std::vector<ScaledAdapter>& adapters,
    std::optional<double> given) {
  std::set<double> scales = known.scales;
  if (given) {
    scales = {check_scale(*given, "program_scale")};
  } else if (scales.empty()) {
    for (const ScaledAdapter& one : adapters) {
      check_known_scale(cache, known, *one.adapter);
      if (one.adapter->scale()) {
        scales.insert(*one.adapter->scale());
      }
    }
  }
  if (scales.empty()) {
    return 1; // no adapter records a scale, so each stands for itself
  }
  if (scales.size() > 1 || *scales.begin() == 0) {
    throw_error_in(
        ErrorKind::Adapter,
        cache.name(),
        "the factor of the programs may be any of {}; give it as `program_scale`, other than 0",
        joined(scales, ", ", number_text));
  }
  return *scales.begin();
}

/// A folder of PEFT as an adapter with the names of the programs.
std::shared_ptr<const Adapter> adapter_for_rooms(
    const BlobCache& cache, const KnownOfCache& known, const std::vector<Room>& rooms, const Adapter& folder) {
  PeftTarget target{cache.name(), {}, known.head_dim, {}};
  for (const Room& room : rooms) {
    target.rows.emplace(room.pair.module, room.pair.out_features);
  }
  return adapter_for(folder, target);
}

/// What the programs have for adapters.
std::vector<Room> rooms_in(const CacheTensors& tensors, const KnownOfCache& known) {
  const std::string& name = tensors.cache()->name();
  if (known.lora.empty()) {
    throw_error_in(ErrorKind::Adapter, name, "its programs have no adapter; merge_adapter() needs none");
  }
  return rooms_of(known.lora, name);
}

/// @throws Error Adapter: tensors of what was loaded last changed since.
void check_unchanged(const BlobCache& cache, const LoadedAdapters& loaded) {
  const auto changed = changed_since(cache, loaded.after);
  if (changed.empty()) {
    return;
  }
  const std::string files =
      joined(loaded.adapters, " and ", [](const ScaledAdapter& one) { return one.adapter->path(); });
  throw_error_in(
      ErrorKind::Adapter,
      cache.name(),
      "{} changed after {} was loaded; load an adapter first",
      quoted_names(changed),
      files.empty() ? "no adapter" : files);
}

/// The adapters with these strengths. @throws Error Adapter: their number differs, or one is not finite.
std::vector<ScaledAdapter> with_strengths(
    const BlobCache& cache, std::vector<ScaledAdapter> adapters, const std::vector<double>& strengths) {
  if (strengths.size() != adapters.size()) {
    throw_error_in(
        ErrorKind::Adapter,
        cache.name(),
        "{} adapters are loaded, but {} strengths are given",
        adapters.size(),
        strengths.size());
  }
  for (size_t i = 0; i < adapters.size(); ++i) {
    adapters[i].factor *= check_scale(strengths[i], "strength");
  }
  return adapters;
}

/// Run the programs with the sum of adapters.
/// @param fine_tune see `AdapterOptions`; only with one adapter.
uint64_t load_sum(
    const CacheTensors& tensors,
    const std::vector<OpenShare>& shares,
    std::optional<double> program_scale,
    const StateDict& fine_tune) {
  const std::shared_ptr<BlobCache>& cache = tensors.cache();
  const auto state = AdaptersOfCache::of(cache);
  const auto turn = state->take_turn(*cache);
  const auto known = state->known(tensors);
  for (const OpenShare& share : shares) {
    if (!AdapterAccess::impl(*share.adapter).peft) {
      check_foundation(tensors, *known, *share.adapter);
      raise_first(AdapterAccess::impl(*share.adapter).unpaired);
    }
  }
  const std::vector<Room> rooms = rooms_in(tensors, *known);
  auto loaded = std::make_shared<LoadedAdapters>();
  loaded->combined = true;
  std::vector<double> strengths;
  for (const auto& [adapter, strength] : shares) {
    const bool peft = AdapterAccess::impl(*adapter).peft != nullptr;
    loaded->adapters.push_back({peft ? adapter_for_rooms(*cache, *known, rooms, *adapter) : adapter, 1});
    strengths.push_back(strength);
  }
  const double scale = scale_of_programs(*cache, *known, loaded->adapters, program_scale);
  for (ScaledAdapter& one : loaded->adapters) {
    one.factor = one.adapter->scale() ? *one.adapter->scale() / scale : 1;
  }
  loaded->strengths = std::move(strengths);
  const NamedViews values = values_of(tensors, *known, *loaded, /*halves=*/false);
  const uint64_t generation = fine_tune.empty()
      ? commit(tensors, values)
      : commit_with_fine_tune(tensors, values, *shares.front().adapter, fine_tune);
  loaded->after = digests_of_adapters(tensors, *known, *loaded);
  state->set_loaded(std::move(loaded));
  return generation;
}

} // namespace

NamedViews values_of(
    const CacheTensors& tensors, const KnownOfCache& known, const LoadedAdapters& loaded, bool halves) {
  const std::string& name = tensors.cache()->name();
  const auto strong = with_strengths(*tensors.cache(), loaded.adapters, loaded.strengths);
  if (loaded.combined) {
    return combined(rooms_in(tensors, known), strong, halves, name);
  }
  const ScaledAdapter& one = strong.front();
  return values_of(*one.adapter, one.factor, halves);
}

std::map<std::string, Digest> digests_of_adapters(
    const CacheTensors& tensors, const KnownOfCache& known, const LoadedAdapters& loaded) {
  std::vector<std::string> keys;
  for (const NamedTensor& tensor : loaded.combined ? known.lora : loaded.adapters.front().adapter->tensors()) {
    const std::vector<std::string> of_tensor = keys_of(tensors, tensor.name);
    keys.insert(keys.end(), of_tensor.begin(), of_tensor.end());
  }
  return digests_of(*tensors.cache(), keys);
}

uint64_t load_adapter(const CacheTensors& tensors, const std::string& path, const AdapterOptions& options) {
  const std::shared_ptr<BlobCache>& cache = tensors.cache();
  cache->check_open();
  check_scale(options.strength, "strength");
  const std::shared_ptr<const Adapter> adapter = Adapter::read(path);
  if (AdapterAccess::impl(*adapter).peft) { // its ranks and modules may be fewer than those of the programs
    return load_sum(tensors, {{adapter, options.strength}}, options.program_scale, options.fine_tune);
  }
  const auto state = AdaptersOfCache::of(cache);
  const auto turn = state->take_turn(*cache);
  const auto known = state->known(tensors);
  if (options.fine_tune.empty()) {
    check_foundation(tensors, *known, *adapter);
  }
  raise_first(AdapterAccess::impl(*adapter).unpaired); // the update itself refuses infinities and NaN
  auto loaded = std::make_shared<LoadedAdapters>();
  const double factor = factor_for(*cache, *known, *adapter, options.program_scale);
  loaded->adapters.push_back({adapter, factor});
  loaded->strengths = {options.strength};
  check_complete(tensors, *known, *adapter);
  const double strong = factor * options.strength;
  const uint64_t generation = options.fine_tune.empty()
      ? with_origin(path, [&] { return commit_adapter(tensors, *adapter, strong); })
      : commit_with_fine_tune(tensors, values_of(*adapter, strong, /*halves=*/false), *adapter, options.fine_tune);
  loaded->after = digests_of_adapters(tensors, *known, *loaded);
  state->set_loaded(std::move(loaded));
  return generation;
}

uint64_t load_adapters(
    const CacheTensors& tensors, const std::vector<AdapterShare>& shares, std::optional<double> program_scale) {
  tensors.cache()->check_open();
  std::vector<OpenShare> open;
  for (const AdapterShare& share : shares) {
    open.push_back({Adapter::read(share.path), share.strength});
  }
  return load_adapters(tensors, open, program_scale);
}

uint64_t load_adapters(
    const CacheTensors& tensors, const std::vector<OpenShare>& shares, std::optional<double> program_scale) {
  tensors.cache()->check_open();
  return load_sum(tensors, shares, program_scale, {});
}

uint64_t set_adapter_strengths(const CacheTensors& tensors, const std::vector<double>& strengths) {
  const std::shared_ptr<BlobCache>& cache = tensors.cache();
  cache->check_open();
  const auto state = AdaptersOfCache::of(cache);
  const auto turn = state->take_turn(*cache);
  const auto before = state->loaded();
  if (!before) {
    throw_error_in(ErrorKind::Adapter, cache->name(), "no adapter was loaded with load_adapter() or load_adapters()");
  }
  const auto strong = with_strengths(*cache, before->adapters, strengths);
  check_unchanged(*cache, *before);
  const auto known = state->known(tensors);
  for (size_t i = 0; i < strong.size(); ++i) {
    const Adapter& adapter = *strong[i].adapter;
    AdapterAccess::impl(adapter).check_unchanged();
    if (strengths[i] != 0 && adapter.foundation()) { // at 0 nothing is computed with it
      check_foundation(tensors, *known, adapter);
    }
  }
  auto loaded = std::make_shared<LoadedAdapters>(*before);
  loaded->strengths = strengths;
  const auto run = [&] { return commit(tensors, values_of(tensors, *known, *loaded, /*halves=*/true)); };
  const uint64_t generation = before->combined ? run() : with_origin(strong.front().adapter->path(), run);
  loaded->after = digests_of_adapters(tensors, *known, *loaded);
  state->set_loaded(std::move(loaded));
  return generation;
}

uint64_t set_adapter_strength(const CacheTensors& tensors, double strength) {
  check_scale(strength, "strength");
  return set_adapter_strengths(tensors, {strength});
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

uint64_t load_adapter(const LogicalTensors& tensors, const std::string& path, const AdapterOptions& options) {
  return internal::load_adapter(internal::TensorsAccess::of(tensors), path, options);
}

uint64_t load_adapters(
    const LogicalTensors& tensors, const std::vector<AdapterShare>& adapters, std::optional<double> program_scale) {
  return internal::load_adapters(internal::TensorsAccess::of(tensors), adapters, program_scale);
}

uint64_t set_adapter_strengths(const LogicalTensors& tensors, const std::vector<double>& strengths) {
  return internal::set_adapter_strengths(internal::TensorsAccess::of(tensors), strengths);
}

uint64_t set_adapter_strength(const LogicalTensors& tensors, double strength) {
  return internal::set_adapter_strength(internal::TensorsAccess::of(tensors), strength);
}

} // namespace blobstore
