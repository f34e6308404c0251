// The library for applications that are compiled without exceptions (-fno-exceptions, also with -fno-rtti).
//
// Each function does what the function or constructor of the same name does, see the other headers; it returns the
// Error that that one throws. Functions that cannot throw are called directly, such as `BlobCache::find` in place of
// `at`. If memory runs out, the error has the kind FileAccess and the number ENOMEM, and nothing was changed.
//
//   auto cache = blobstore::nothrow::open({"model.ptd"});
//   if (!cache.ok()) {
//     log(cache.error().what());
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/executor/method_meta.h>

#include <blobstore/adapters.h>
#include <blobstore/cache.h>
#include <blobstore/export.h>
#include <blobstore/mezo.h>
#include <blobstore/packed.h>
#include <blobstore/program.h>
#include <blobstore/reading.h>
#include <blobstore/releases.h>
#include <blobstore/result.h>
#include <blobstore/runners.h>
#include <blobstore/tensors.h>
#include <blobstore/training.h>
#include <blobstore/version.h>

namespace blobstore BLOBSTORE_API {
namespace nothrow {

// Caches: <blobstore/cache.h>, <blobstore/reading.h>

Result<std::shared_ptr<BlobCache>> open(
    const std::vector<std::string>& paths,
    BlobCache::Mode mode = BlobCache::Mode::Private,
    std::shared_ptr<BlobCache> base = nullptr,
    std::shared_ptr<PackedStore> packed = nullptr) noexcept;
/// Holds off commits until it is destroyed.
Result<std::unique_ptr<BlobCache::Reading>> read(const BlobCache& cache) noexcept;
Result<uint64_t> update(BlobCache& cache, const std::vector<Change>& changes) noexcept;
Result<uint64_t> load(BlobCache& cache, const std::string& path) noexcept;
Result<uint64_t> load_all(BlobCache& cache, const std::vector<std::string>& paths) noexcept;
Result<uint64_t> revert(BlobCache& cache) noexcept;
Result<uint64_t> revert(BlobCache& cache, const std::vector<std::string>& keys) noexcept;
Result<uint64_t> save(const BlobCache& cache, const std::string& path, bool dirty_only = false) noexcept;
Result<uint64_t> make_working_copy(const std::vector<std::string>& paths, const std::string& target) noexcept;
Result<std::vector<std::string>> dirty(const BlobCache& cache) noexcept;
Result<CacheStats> stats(const BlobCache& cache) noexcept;
Result<bool> verify(const BlobCache& cache) noexcept;
Result<uint64_t> version(const BlobCache& cache, std::string_view key) noexcept;
Result<bool> differs_from_file(const BlobCache& cache, std::string_view key) noexcept;
Result<std::optional<std::string>> recorded_digest(const BlobCache& cache, std::string_view key) noexcept;
Result<std::optional<std::string>> file_digest(const BlobCache& cache, std::string_view key) noexcept;
Result<void> check_files(const BlobCache& cache) noexcept;

// Programs: <blobstore/program.h>

Result<std::shared_ptr<Program>> load_program(
    const std::string& path,
    std::shared_ptr<BlobCache> cache,
    const std::shared_ptr<PackedStore>& packed = nullptr) noexcept;
Result<std::vector<std::string>> needs(const Program& program, const std::string& method) noexcept;
Result<std::vector<std::string>> input_names(const Program& program, const std::string& method) noexcept;
Result<std::vector<std::string>> backends(const Program& program, const std::string& method) noexcept;
Result<executorch::runtime::MethodMeta> method_meta(const Program& program, const std::string& method) noexcept;
Result<std::shared_ptr<Method>> load_method(Program& program, const std::string& name) noexcept;
Result<Outputs> forward(
    Program& program,
    const std::vector<executorch::runtime::EValue>& inputs,
    const RunOptions& options = RunOptions()) noexcept;
Result<Outputs> execute(
    Method& method,
    const std::vector<executorch::runtime::EValue>& inputs,
    const RunOptions& options = RunOptions()) noexcept;
Result<executorch::extension::TensorPtr> output_memory(Method& method, size_t index) noexcept;
Result<std::vector<std::pair<std::string, executorch::extension::TensorPtr>>> state_memory(Method& method) noexcept;

// Packed weights: <blobstore/packed.h>

Result<std::shared_ptr<PackedStore>> open_packed(
    const std::string& folder, const PackedOptions& options = PackedOptions()) noexcept;
Result<PackedStats> stats(const PackedStore& store) noexcept;
Result<std::vector<PackedFile>> list(const PackedStore& store) noexcept;
Result<std::vector<PackedFile>> verify(const PackedStore& store) noexcept;
Result<std::vector<PackedFile>> gc(const PackedStore& store) noexcept;

// Tensors by name: <blobstore/tensors.h>

Result<StateDict> load_state_dict(const std::string& path) noexcept;
Result<std::unique_ptr<LogicalTensors>> logical_tensors(std::shared_ptr<BlobCache> cache) noexcept;
Result<LogicalTensor> at(const LogicalTensors& tensors, std::string_view name) noexcept;
Result<executorch::extension::TensorPtr> value(const LogicalTensors& tensors, std::string_view name) noexcept;
Result<Updated> update(const LogicalTensors& tensors, const StateDict& values, bool finite = false) noexcept;
Result<Updated> update_state_dict(
    const LogicalTensors& tensors, const StateDict& values, bool strict = true, bool finite = false) noexcept;

// Adapters: <blobstore/adapters.h>

Result<std::string> foundation_fingerprint(const std::vector<std::string>& paths) noexcept;
Result<std::shared_ptr<const Adapter>> read_adapter(const std::string& path) noexcept;
Result<executorch::extension::TensorPtr> tensor(const Adapter& adapter, std::string_view name) noexcept;
Result<std::vector<Error>> problems(const Adapter& adapter) noexcept;
Result<uint64_t> save_adapter(
    const std::string& path,
    const StateDict& tensors,
    const std::vector<std::string>& foundation,
    double scale) noexcept;
Result<uint64_t> bind_adapter(
    const std::string& source,
    const std::string& target,
    const std::vector<std::string>& foundation,
    std::optional<double> scale = std::nullopt) noexcept;
Result<uint64_t> load_adapter(
    const LogicalTensors& tensors, const std::string& path, const AdapterOptions& options = AdapterOptions()) noexcept;
Result<uint64_t> load_adapters(
    const LogicalTensors& tensors,
    const std::vector<AdapterShare>& adapters,
    std::optional<double> program_scale = std::nullopt) noexcept;
Result<uint64_t> set_adapter_strengths(const LogicalTensors& tensors, const std::vector<double>& strengths) noexcept;
Result<uint64_t> set_adapter_strength(const LogicalTensors& tensors, double strength) noexcept;
Result<std::unique_ptr<MergedAdapter>> merge_adapter(
    const LogicalTensors& tensors, const std::string& path, const MergeOptions& options = MergeOptions()) noexcept;
Result<std::unique_ptr<MergedAdapter>> merge_adapter(
    const LogicalTensors& tensors, const StateDict& adapter, const MergeOptions& options = MergeOptions()) noexcept;
Result<uint64_t> undo(MergedAdapter& adapter) noexcept;

// Training: <blobstore/training.h>

Result<std::unique_ptr<SGD>> sgd(const SGDOptions& options) noexcept;
Result<void> set_options(SGD& optimizer, const SGDOptions& options) noexcept;
Result<std::unique_ptr<MeZO>> mezo(
    std::shared_ptr<BlobCache> cache,
    const MeZOOptions& options = MeZOOptions(),
    const std::vector<std::string>& names = {}) noexcept;
/// The loss must not throw.
Result<double> step(MeZO& optimizer, const std::function<double()>& loss) noexcept;
Result<void> set_options(MeZO& optimizer, const MeZOOptions& options) noexcept;
Result<std::unique_ptr<AdamW>> adamw(const AdamWOptions& options = AdamWOptions()) noexcept;
Result<void> set_options(AdamW& optimizer, const AdamWOptions& options) noexcept;
Result<std::unique_ptr<TrainingProgram>> training_program(
    std::shared_ptr<Program> program, const std::string& method = "forward") noexcept;
Result<Outputs> forward_backward(
    TrainingProgram& training,
    const std::vector<executorch::runtime::EValue>& inputs,
    const std::vector<bool>& in_place = {}) noexcept;
Result<Outputs> step(
    TrainingProgram& training,
    Optimizer& optimizer,
    const std::vector<executorch::runtime::EValue>& inputs,
    OnNan on_nan = OnNan::Throw,
    const std::vector<bool>& in_place = {}) noexcept;
Result<void> lock(TrainingProgram& training) noexcept;
Result<uint64_t> save(
    TrainingProgram& training,
    const std::string& path,
    const Optimizer* optimizer = nullptr,
    const std::vector<std::string>& base = {},
    const std::map<std::string, std::string>& metadata = {}) noexcept;
Result<void> load(
    TrainingProgram& training,
    const std::string& path,
    Optimizer* optimizer = nullptr,
    const std::vector<std::string>& base = {}) noexcept;
Result<Updated> publish(
    TrainingProgram& training, const LogicalTensors& target, bool strict = true, bool finite = false) noexcept;
Result<Updated> publish(
    TrainingProgram& training,
    const std::shared_ptr<BlobCache>& target,
    bool strict = true,
    bool finite = false) noexcept;

// Requests to language models: <blobstore/runners.h>

Result<std::unique_ptr<RunnerQueue>> runner_queue(
    const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> program_scale = std::nullopt) noexcept;
/// The value is null if the request was stopped while it waited.
Result<std::unique_ptr<RunnerQueue::Turn>> begin(
    RunnerQueue& queue, const std::string& prompt, const RequestOptions& options = RequestOptions()) noexcept;
Result<void> set_adapter(RunnerQueue& queue, const std::string& name, const std::string& path) noexcept;
Result<void> remove_adapter(RunnerQueue& queue, const std::string& name) noexcept;
/// The constructor of `Runners`.
template <typename Runner>
Result<std::unique_ptr<Runners<Runner>>> make_runners(
    std::vector<RunnerOnCache<Runner>> runners, std::optional<double> program_scale = std::nullopt) {
  Result<std::unique_ptr<RunnerQueue>> queue = runner_queue(Runners<Runner>::caches_of(runners), program_scale);
  if (!queue.ok()) {
    return queue.error();
  }
  auto made = std::make_unique<Runners<Runner>>(std::move(queue).get(), std::move(runners));
  if (const Result<void> loaded = made->load(); !loaded.ok()) {
    return loaded.error();
  }
  return made;
}
/// `Runners::generate`.
template <typename Runner, typename Config>
Result<std::string> generate(
    Runners<Runner>& runners,
    const std::string& prompt,
    const Config& config,
    const RequestOptions& options = RequestOptions(),
    const std::function<void(const std::string&)>& on_token = nullptr) {
  const Result<std::unique_ptr<RunnerQueue::Turn>> turn = begin(runners.queue(), prompt, options);
  if (!turn.ok()) {
    return turn.error();
  }
  if (*turn == nullptr) {
    return std::string();
  }
  return internal::answer(**turn, runners.runner((*turn)->runner()), config, on_token);
}

// Releases: <blobstore/releases.h>

Result<Missing> missing(
    const std::string& index, const std::string& directory, const ReleaseOptions& options = ReleaseOptions()) noexcept;
Result<InstalledRelease> commit(
    const std::string& index, const std::string& directory, const ReleaseOptions& options = ReleaseOptions()) noexcept;
/// `download` must not throw.
Result<InstalledRelease> pull(
    const std::string& url,
    const std::string& directory,
    const Download& download,
    const ReleaseOptions& options = ReleaseOptions()) noexcept;
Result<Collected> gc(const std::string& directory, uint64_t keep = 1) noexcept;
Result<std::shared_ptr<Release>> open_release(
    const std::string& directory, const OpenOptions& options = OpenOptions()) noexcept;
Result<Followed> follow(Release& release, FollowAdapters adapters = FollowAdapters::Keep) noexcept;

} // namespace nothrow
} // namespace blobstore
