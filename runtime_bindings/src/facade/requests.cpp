#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using internal::attempt;

Result<std::unique_ptr<RunnerQueue>> runner_queue(
    const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> program_scale) noexcept {
  return attempt([&] { return std::make_unique<RunnerQueue>(caches, program_scale); });
}

Result<std::unique_ptr<RunnerQueue::Turn>> begin(
    RunnerQueue& queue, const std::string& prompt, const RequestOptions& options) noexcept {
  return attempt([&] { return queue.begin(prompt, options); });
}

Result<void> set_adapter(RunnerQueue& queue, const std::string& name, const std::string& path) noexcept {
  return attempt([&] { queue.set_adapter(name, path); });
}

Result<void> remove_adapter(RunnerQueue& queue, const std::string& name) noexcept {
  return attempt([&] { queue.remove_adapter(name); });
}

} // namespace nothrow
} // namespace blobstore
