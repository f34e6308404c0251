#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using executorch::extension::TensorPtr;
using internal::attempt;

Result<StateDict> load_state_dict(const std::string& path) noexcept {
  return attempt([&] { return blobstore::load_state_dict(path); });
}

Result<std::unique_ptr<LogicalTensors>> logical_tensors(std::shared_ptr<BlobCache> cache) noexcept {
  return attempt([&] { return std::make_unique<LogicalTensors>(std::move(cache)); });
}

Result<LogicalTensor> at(const LogicalTensors& tensors, std::string_view name) noexcept {
  return attempt([&] { return tensors.at(name); });
}

Result<TensorPtr> value(const LogicalTensors& tensors, std::string_view name) noexcept {
  return attempt([&] { return tensors.value(name); });
}

Result<Updated> update(const LogicalTensors& tensors, const StateDict& values, bool finite) noexcept {
  return attempt([&] { return tensors.update(values, finite); });
}

Result<Updated> update_state_dict(
    const LogicalTensors& tensors, const StateDict& values, bool strict, bool finite) noexcept {
  return attempt([&] { return tensors.update_state_dict(values, strict, finite); });
}

} // namespace nothrow
} // namespace blobstore
