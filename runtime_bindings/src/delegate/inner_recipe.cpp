#include "delegate/inner_recipe.h"

#include <array>
#include <cstring>
#include <utility>

#include <executorch/runtime/platform/log.h>

#include "format/flatbuffer.h"

namespace blobstore::internal {

namespace et = executorch::runtime;
using EtError = et::Error;

namespace {

constexpr char kTableSpec[] = "blobstore.table"; // of this delegate; not passed to the inner backend
// XNNPACK's options; other backends ignore them
constexpr char kWeightCacheOption[] = "weight_cache_enabled";
constexpr char kPackedPathOption[] = "packed_cache_path";
constexpr char kPackedSaveOption[] = "save_weight_cache_on_disk";

DelegatePayload read_payload(const et::FreeableBuffer& processed) {
  try {
    return read_delegate_payload(static_cast<const uint8_t*>(processed.data()), processed.size());
  } catch (const FormatError& error) {
    throw Failure{
        EtError::DelegateInvalidCompatibility,
        ErrorKind::InvalidFile,
        std::string("the payload of a BlobStoreBackend is damaged: ") + error.what()};
  }
}

et::BackendInterface* find_backend(const std::string& name) {
  et::BackendInterface* backend = et::get_backend_class(name.c_str());
  if (backend == nullptr || !backend->is_available()) {
    throw Failure{
        EtError::NotFound,
        ErrorKind::MissingBackend,
        "it runs on backend '" + name + "', which this process does not have"};
  }
  return backend;
}

et::BackendOption make_option(const char* key, et::OptionValue value) {
  et::BackendOption option{};
  std::strncpy(option.key, key, sizeof option.key - 1);
  option.value = value;
  return option;
}

/// The options of a load, as the inner backend gets them.
std::vector<et::BackendOption> inner_options(et::Span<const et::BackendOption> given) {
  std::vector<et::BackendOption> options;
  bool has_weight_cache = false;
  for (const et::BackendOption& option : given) {
    const auto is = [&](const char* key) { return std::strcmp(option.key, key) == 0; };
    if (is(kPackedPathOption) || is(kPackedSaveOption)) {
      ET_LOG(Info, "BlobStoreBackend: no effect of '%s': packed weights are not kept in a file", option.key);
      continue;
    }
    has_weight_cache = has_weight_cache || is(kWeightCacheOption);
    options.push_back(option);
  }
  if (!has_weight_cache) {
    options.push_back(make_option(kWeightCacheOption, true));
  }
  // An empty path, because the process may have a path for all loads. Weights are packed under names that count
  // versions in this process; after the next launch these names would stand for other weights.
  options.push_back(make_option(kPackedPathOption, std::array<char, et::kMaxOptionValueLength>{}));
  return options;
}

} // namespace

std::shared_ptr<const InnerRecipe> make_recipe(
    et::BackendInitContext& context, const et::FreeableBuffer& processed, et::ArrayRef<et::CompileSpec> specs) {
  auto recipe = std::make_shared<InnerRecipe>();
  recipe->payload = read_payload(processed);
  const auto* start = static_cast<const uint8_t*>(processed.data());
  recipe->bytes.assign(start, start + recipe->payload.size);
  recipe->backend = find_backend(recipe->payload.inner);
  recipe->method = context.get_method_name() != nullptr ? context.get_method_name() : "";
  for (const et::CompileSpec& spec : specs) {
    if (std::strcmp(spec.key, kTableSpec) != 0) {
      recipe->specs.push_back(spec);
    }
  }
  recipe->options = inner_options(context.runtime_specs());
  return recipe;
}

} // namespace blobstore::internal
