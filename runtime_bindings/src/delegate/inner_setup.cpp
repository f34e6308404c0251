#include "delegate/inner_setup.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <variant>

#include "format/format_error.h"
#include "os/text.h"
#include "packed/load_plan.h"

namespace blobstore::internal {

namespace {

constexpr char kTableSpec[] = "blobstore.table"; // of this delegate; not passed to the inner backend
constexpr char kPackedSaveOption[] = "save_weight_cache_on_disk"; // of XNNPACK

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
        format("it runs on backend '{}', which this process does not have", name)};
  }
  return backend;
}

et::BackendOption make_option(const char* key, et::OptionValue value) {
  et::BackendOption option{};
  std::strncpy(option.key, key, sizeof option.key - 1);
  option.value = value;
  return option;
}

/// The options of a load, as the inner backend gets them. @param own_path set to the application's path.
std::vector<et::BackendOption> inner_options(et::Span<const et::BackendOption> given, std::string& own_path) {
  std::vector<et::BackendOption> options;
  bool has_weight_cache = false;
  for (const et::BackendOption& option : given) {
    const auto is = [&](const char* key) { return std::strcmp(option.key, key) == 0; };
    const auto* text = std::get_if<std::array<char, et::kMaxOptionValueLength>>(&option.value);
    if (is(kPackedPathOption) && text != nullptr) {
      own_path.assign(text->data(), strnlen(text->data(), text->size()));
    }
    if (is(kPackedPathOption) || is(kPackedSaveOption)) { // the delegate sets the path; ExecuTorch saves by itself
      continue;
    }
    has_weight_cache = has_weight_cache || is(kWeightCacheOption);
    options.push_back(option);
  }
  if (!has_weight_cache) {
    options.push_back(weight_cache_option());
  }
  return options;
}

} // namespace

et::BackendOption packed_path_option(const std::string& path) {
  std::array<char, et::kMaxOptionValueLength> text{};
  std::memcpy(text.data(), path.data(), std::min(path.size(), kMostPath));
  return make_option(kPackedPathOption, text);
}

et::BackendOption weight_cache_option() {
  return make_option(kWeightCacheOption, true);
}

std::shared_ptr<InnerSetup> make_setup(
    et::BackendInitContext& context, const et::FreeableBuffer& processed, et::ArrayRef<et::CompileSpec> specs) {
  auto setup = std::make_shared<InnerSetup>();
  setup->payload = read_payload(processed);
  const auto* start = static_cast<const uint8_t*>(processed.data());
  setup->bytes.assign(start, start + setup->payload.size);
  setup->backend = find_backend(setup->payload.inner);
  setup->method = context.get_method_name() != nullptr ? context.get_method_name() : "";
  for (const et::CompileSpec& spec : specs) {
    if (std::strcmp(spec.key, kTableSpec) != 0) {
      setup->specs.push_back(spec);
    }
  }
  setup->options = inner_options(context.runtime_specs(), setup->own_path);
  setup->named_by_content = !setup->own_path.empty();
  return setup;
}

} // namespace blobstore::internal
