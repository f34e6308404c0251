#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using internal::attempt;

Result<std::string> foundation_fingerprint(const std::vector<std::string>& paths) noexcept {
  return attempt([&] { return blobstore::foundation_fingerprint(paths); });
}

Result<std::shared_ptr<const Adapter>> read_adapter(const std::string& path) noexcept {
  return attempt([&] { return Adapter::read(path); });
}

Result<uint64_t> save_adapter(
    const std::string& path,
    const StateDict& tensors,
    const std::vector<std::string>& foundation,
    double scale) noexcept {
  return attempt([&] { return blobstore::save_adapter(path, tensors, foundation, scale); });
}

Result<uint64_t> bind_adapter(
    const std::string& source,
    const std::string& target,
    const std::vector<std::string>& foundation,
    std::optional<double> scale) noexcept {
  return attempt([&] { return blobstore::bind_adapter(source, target, foundation, scale); });
}

Result<uint64_t> load_adapter(
    const LogicalTensors& tensors, const std::string& path, const AdapterOptions& options) noexcept {
  return attempt([&] { return blobstore::load_adapter(tensors, path, options); });
}

Result<uint64_t> load_adapters(
    const LogicalTensors& tensors,
    const std::vector<AdapterShare>& adapters,
    std::optional<double> program_scale) noexcept {
  return attempt([&] { return blobstore::load_adapters(tensors, adapters, program_scale); });
}

Result<uint64_t> set_adapter_strengths(const LogicalTensors& tensors, const std::vector<double>& strengths) noexcept {
  return attempt([&] { return blobstore::set_adapter_strengths(tensors, strengths); });
}

Result<uint64_t> set_adapter_strength(const LogicalTensors& tensors, double strength) noexcept {
  return attempt([&] { return blobstore::set_adapter_strength(tensors, strength); });
}

Result<std::unique_ptr<MergedAdapter>> merge_adapter(
    const LogicalTensors& tensors, const std::string& path, const MergeOptions& options) noexcept {
  return attempt([&] { return blobstore::merge_adapter(tensors, path, options); });
}

Result<std::unique_ptr<MergedAdapter>> merge_adapter(
    const LogicalTensors& tensors, const StateDict& adapter, const MergeOptions& options) noexcept {
  return attempt([&] { return blobstore::merge_adapter(tensors, adapter, options); });
}

Result<uint64_t> undo(MergedAdapter& adapter) noexcept {
  return attempt([&] { return adapter.undo(); });
}

Result<executorch::extension::TensorPtr> tensor(const Adapter& adapter, std::string_view name) noexcept {
  return attempt([&] { return adapter.tensor(name); });
}

Result<std::vector<Error>> problems(const Adapter& adapter) noexcept {
  return attempt([&] { return adapter.problems(); });
}

} // namespace nothrow
} // namespace blobstore
