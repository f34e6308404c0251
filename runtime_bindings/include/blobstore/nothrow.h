// The library for applications that are compiled without exceptions (-fno-exceptions, also with -fno-rtti).
//
// Each function makes the call that is named behind `noexcept`, see the other headers, and returns the Error that that
// one throws. Functions that cannot throw are called directly, such as `BlobCache::find` in place of `at`. If memory
// runs out, the error has the kind FileAccess and the number ENOMEM, and nothing was changed.
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

// The call that a function makes, by the library that has the function. Only when that library is compiled, in
// src/facade, these are the function's body.
#ifndef BLOBSTORE_RUNTIME
#define BLOBSTORE_RUNTIME(...)
#endif
#ifndef BLOBSTORE_RELEASES
#define BLOBSTORE_RELEASES(...)
#endif
#ifndef BLOBSTORE_RUNNERS
#define BLOBSTORE_RUNNERS(...)
#endif

namespace blobstore BLOBSTORE_API {
namespace nothrow {

// Caches: <blobstore/cache.h>, <blobstore/reading.h>

Result<std::shared_ptr<BlobCache>> open(
    const std::vector<std::string>& paths,
    BlobCache::Mode mode = BlobCache::Mode::Private,
    std::shared_ptr<BlobCache> base = nullptr,
    std::shared_ptr<PackedStore> packed = nullptr) noexcept
    BLOBSTORE_RUNTIME(BlobCache::open(paths, mode, std::move(base), std::move(packed)));
/// Holds off commits until it is destroyed.
Result<std::unique_ptr<BlobCache::Reading>> read(const BlobCache& cache) noexcept
    BLOBSTORE_RUNTIME(std::make_unique<BlobCache::Reading>(cache));
Result<uint64_t> update(BlobCache& cache, const std::vector<Change>& changes) noexcept
    BLOBSTORE_RUNTIME(cache.update(changes));
Result<uint64_t> load(BlobCache& cache, const std::string& path) noexcept BLOBSTORE_RUNTIME(cache.load(path));
Result<uint64_t> load_all(BlobCache& cache, const std::vector<std::string>& paths) noexcept
    BLOBSTORE_RUNTIME(cache.load_all(paths));
Result<uint64_t> revert(BlobCache& cache) noexcept BLOBSTORE_RUNTIME(cache.revert());
Result<uint64_t> revert(BlobCache& cache, const std::vector<std::string>& keys) noexcept
    BLOBSTORE_RUNTIME(cache.revert(keys));
Result<uint64_t> save(const BlobCache& cache, const std::string& path, bool dirty_only = false) noexcept
    BLOBSTORE_RUNTIME(cache.save(path, dirty_only));
Result<uint64_t> make_working_copy(const std::vector<std::string>& paths, const std::string& target) noexcept
    BLOBSTORE_RUNTIME(blobstore::make_working_copy(paths, target));
Result<std::vector<std::string>> dirty(const BlobCache& cache) noexcept BLOBSTORE_RUNTIME(cache.dirty());
Result<CacheStats> stats(const BlobCache& cache) noexcept BLOBSTORE_RUNTIME(cache.stats());
Result<bool> verify(const BlobCache& cache) noexcept BLOBSTORE_RUNTIME(cache.verify());
Result<uint64_t> version(const BlobCache& cache, std::string_view key) noexcept BLOBSTORE_RUNTIME(cache.version(key));
Result<bool> differs_from_file(const BlobCache& cache, std::string_view key) noexcept
    BLOBSTORE_RUNTIME(cache.differs_from_file(key));
Result<std::optional<std::string>> recorded_digest(const BlobCache& cache, std::string_view key) noexcept
    BLOBSTORE_RUNTIME(cache.recorded_digest(key));
Result<std::optional<std::string>> file_digest(const BlobCache& cache, std::string_view key) noexcept
    BLOBSTORE_RUNTIME(cache.file_digest(key));
Result<void> check_files(const BlobCache& cache) noexcept BLOBSTORE_RUNTIME(cache.check_files());

// Programs: <blobstore/program.h>

Result<std::shared_ptr<Program>> load_program(
    const std::string& path,
    std::shared_ptr<BlobCache> cache,
    const std::shared_ptr<PackedStore>& packed = nullptr) noexcept
    BLOBSTORE_RUNTIME(Program::load(path, std::move(cache), packed));
Result<std::vector<std::string>> needs(const Program& program, const std::string& method) noexcept
    BLOBSTORE_RUNTIME(program.needs(method));
Result<std::vector<std::string>> input_names(const Program& program, const std::string& method) noexcept
    BLOBSTORE_RUNTIME(program.input_names(method));
Result<std::vector<std::string>> backends(const Program& program, const std::string& method) noexcept
    BLOBSTORE_RUNTIME(program.backends(method));
Result<executorch::runtime::MethodMeta> method_meta(const Program& program, const std::string& method) noexcept
    BLOBSTORE_RUNTIME(program.method_meta(method));
Result<std::shared_ptr<Method>> load_method(Program& program, const std::string& name) noexcept
    BLOBSTORE_RUNTIME(program.load_method(name));
Result<Outputs> forward(
    Program& program,
    const std::vector<executorch::runtime::EValue>& inputs,
    const RunOptions& options = RunOptions()) noexcept BLOBSTORE_RUNTIME(program.forward(inputs, options));
Result<Outputs> execute(
    Method& method,
    const std::vector<executorch::runtime::EValue>& inputs,
    const RunOptions& options = RunOptions()) noexcept BLOBSTORE_RUNTIME(method.execute(inputs, options));
Result<executorch::extension::TensorPtr> output_memory(Method& method, size_t index) noexcept
    BLOBSTORE_RUNTIME(method.output_memory(index));
Result<std::vector<std::pair<std::string, executorch::extension::TensorPtr>>> state_memory(Method& method) noexcept
    BLOBSTORE_RUNTIME(method.state_memory());

// Tensors by name: <blobstore/tensors.h>

Result<StateDict> load_state_dict(const std::string& path) noexcept BLOBSTORE_RUNTIME(blobstore::load_state_dict(path));
Result<std::unique_ptr<LogicalTensors>> logical_tensors(std::shared_ptr<BlobCache> cache) noexcept
    BLOBSTORE_RUNTIME(std::make_unique<LogicalTensors>(std::move(cache)));
Result<LogicalTensor> at(const LogicalTensors& tensors, std::string_view name) noexcept
    BLOBSTORE_RUNTIME(tensors.at(name));
Result<executorch::extension::TensorPtr> value(const LogicalTensors& tensors, std::string_view name) noexcept
    BLOBSTORE_RUNTIME(tensors.value(name));
Result<Updated> update(const LogicalTensors& tensors, const StateDict& values, bool finite = false) noexcept
    BLOBSTORE_RUNTIME(tensors.update(values, finite));
Result<Updated> update_state_dict(
    const LogicalTensors& tensors, const StateDict& values, bool strict = true, bool finite = false) noexcept
    BLOBSTORE_RUNTIME(tensors.update_state_dict(values, strict, finite));

#ifndef BLOBSTORE_MINIMAL
// Packed weights: <blobstore/packed.h>

Result<std::shared_ptr<PackedStore>> open_packed(
    const std::string& folder, const PackedOptions& options = PackedOptions()) noexcept
    BLOBSTORE_RUNTIME(PackedStore::open(folder, options));
Result<PackedStats> stats(const PackedStore& store) noexcept BLOBSTORE_RUNTIME(store.stats());
Result<std::vector<PackedFile>> list(const PackedStore& store) noexcept BLOBSTORE_RUNTIME(store.list());
Result<std::vector<PackedFile>> verify(const PackedStore& store) noexcept BLOBSTORE_RUNTIME(store.verify());
Result<std::vector<PackedFile>> gc(const PackedStore& store) noexcept BLOBSTORE_RUNTIME(store.gc());

// Adapters: <blobstore/adapters.h>

Result<std::string> foundation_fingerprint(const std::vector<std::string>& paths) noexcept
    BLOBSTORE_RUNTIME(blobstore::foundation_fingerprint(paths));
Result<std::shared_ptr<const Adapter>> read_adapter(const std::string& path) noexcept
    BLOBSTORE_RUNTIME(Adapter::read(path));
Result<executorch::extension::TensorPtr> tensor(const Adapter& adapter, std::string_view name) noexcept
    BLOBSTORE_RUNTIME(adapter.tensor(name));
Result<std::vector<Error>> problems(const Adapter& adapter) noexcept BLOBSTORE_RUNTIME(adapter.problems());
Result<uint64_t> save_adapter(
    const std::string& path,
    const StateDict& tensors,
    const std::vector<std::string>& foundation,
    double scale) noexcept BLOBSTORE_RUNTIME(blobstore::save_adapter(path, tensors, foundation, scale));
Result<uint64_t> bind_adapter(
    const std::string& source,
    const std::string& target,
    const std::vector<std::string>& foundation,
    std::optional<double> scale = std::nullopt) noexcept
    BLOBSTORE_RUNTIME(blobstore::bind_adapter(source, target, foundation, scale));
Result<uint64_t> load_adapter(
    const LogicalTensors& tensors, const std::string& path, const AdapterOptions& options = AdapterOptions()) noexcept
    BLOBSTORE_RUNTIME(blobstore::load_adapter(tensors, path, options));
Result<uint64_t> load_adapters(
    const LogicalTensors& tensors,
    const std::vector<AdapterShare>& adapters,
    std::optional<double> program_scale = std::nullopt) noexcept
    BLOBSTORE_RUNTIME(blobstore::load_adapters(tensors, adapters, program_scale));
Result<uint64_t> set_adapter_strengths(const LogicalTensors& tensors, const std::vector<double>& strengths) noexcept
    BLOBSTORE_RUNTIME(blobstore::set_adapter_strengths(tensors, strengths));
Result<uint64_t> set_adapter_strength(const LogicalTensors& tensors, double strength) noexcept
    BLOBSTORE_RUNTIME(blobstore::set_adapter_strength(tensors, strength));
Result<std::unique_ptr<MergedAdapter>> merge_adapter(
    const LogicalTensors& tensors, const std::string& path, const MergeOptions& options = MergeOptions()) noexcept
    BLOBSTORE_RUNTIME(blobstore::merge_adapter(tensors, path, options));
Result<std::unique_ptr<MergedAdapter>> merge_adapter(
    const LogicalTensors& tensors, const StateDict& adapter, const MergeOptions& options = MergeOptions()) noexcept
    BLOBSTORE_RUNTIME(blobstore::merge_adapter(tensors, adapter, options));
Result<uint64_t> undo(MergedAdapter& adapter) noexcept BLOBSTORE_RUNTIME(adapter.undo());

// Training: <blobstore/training.h>

Result<std::unique_ptr<SGD>> sgd(const SGDOptions& options) noexcept BLOBSTORE_RUNTIME(std::make_unique<SGD>(options));
Result<void> set_options(SGD& optimizer, const SGDOptions& options) noexcept
    BLOBSTORE_RUNTIME(optimizer.set_options(options));
Result<std::unique_ptr<MeZO>> mezo(
    std::shared_ptr<BlobCache> cache,
    const MeZOOptions& options = MeZOOptions(),
    const std::vector<std::string>& names = {}) noexcept
    BLOBSTORE_RUNTIME(std::make_unique<MeZO>(std::move(cache), options, names));
/// The loss must not throw.
Result<double> step(MeZO& optimizer, const std::function<double()>& loss) noexcept
    BLOBSTORE_RUNTIME(optimizer.step(loss));
Result<void> set_options(MeZO& optimizer, const MeZOOptions& options) noexcept
    BLOBSTORE_RUNTIME(optimizer.set_options(options));
Result<std::unique_ptr<AdamW>> adamw(const AdamWOptions& options = AdamWOptions()) noexcept
    BLOBSTORE_RUNTIME(std::make_unique<AdamW>(options));
Result<void> set_options(AdamW& optimizer, const AdamWOptions& options) noexcept
    BLOBSTORE_RUNTIME(optimizer.set_options(options));
Result<std::unique_ptr<TrainingProgram>> training_program(
    std::shared_ptr<Program> program, const std::string& method = "forward") noexcept
    BLOBSTORE_RUNTIME(std::make_unique<TrainingProgram>(std::move(program), method));
Result<Outputs> forward_backward(
    TrainingProgram& training,
    const std::vector<executorch::runtime::EValue>& inputs,
    const std::vector<bool>& in_place = {}) noexcept BLOBSTORE_RUNTIME(training.forward_backward(inputs, in_place));
Result<Outputs> step(
    TrainingProgram& training,
    Optimizer& optimizer,
    const std::vector<executorch::runtime::EValue>& inputs,
    OnNan on_nan = OnNan::Throw,
    const std::vector<bool>& in_place = {}) noexcept
    BLOBSTORE_RUNTIME(training.step(optimizer, inputs, on_nan, in_place));
Result<void> lock(TrainingProgram& training) noexcept BLOBSTORE_RUNTIME(training.lock());
Result<uint64_t> save(
    TrainingProgram& training,
    const std::string& path,
    const Optimizer* optimizer = nullptr,
    const std::vector<std::string>& base = {},
    const std::map<std::string, std::string>& metadata = {}) noexcept
    BLOBSTORE_RUNTIME(training.save(path, optimizer, base, metadata));
Result<void> load(
    TrainingProgram& training,
    const std::string& path,
    Optimizer* optimizer = nullptr,
    const std::vector<std::string>& base = {}) noexcept BLOBSTORE_RUNTIME(training.load(path, optimizer, base));
Result<Updated> publish(
    TrainingProgram& training, const LogicalTensors& target, bool strict = true, bool finite = false) noexcept
    BLOBSTORE_RUNTIME(training.publish(target, strict, finite));
Result<Updated> publish(
    TrainingProgram& training,
    const std::shared_ptr<BlobCache>& target,
    bool strict = true,
    bool finite = false) noexcept BLOBSTORE_RUNTIME(training.publish(target, strict, finite));

// Requests to language models: <blobstore/runners.h>

Result<std::unique_ptr<RunnerQueue>> runner_queue(
    const std::vector<std::shared_ptr<BlobCache>>& caches, std::optional<double> program_scale = std::nullopt) noexcept
    BLOBSTORE_RUNNERS(std::make_unique<RunnerQueue>(caches, program_scale));
/// The value is null if the request was stopped while it waited.
Result<std::unique_ptr<RunnerQueue::Turn>> begin(
    RunnerQueue& queue, const std::string& prompt, const RequestOptions& options = RequestOptions()) noexcept
    BLOBSTORE_RUNNERS(queue.begin(prompt, options));
Result<void> set_adapter(RunnerQueue& queue, const std::string& name, const std::string& path) noexcept
    BLOBSTORE_RUNNERS(queue.set_adapter(name, path));
Result<void> remove_adapter(RunnerQueue& queue, const std::string& name) noexcept
    BLOBSTORE_RUNNERS(queue.remove_adapter(name));
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
    const std::string& index, const std::string& directory, const ReleaseOptions& options = ReleaseOptions()) noexcept
    BLOBSTORE_RELEASES(blobstore::missing(index, directory, options));
Result<InstalledRelease> commit(
    const std::string& index, const std::string& directory, const ReleaseOptions& options = ReleaseOptions()) noexcept
    BLOBSTORE_RELEASES(blobstore::commit(index, directory, options));
/// `download` must not throw.
Result<InstalledRelease> pull(
    const std::string& url,
    const std::string& directory,
    const Download& download,
    const ReleaseOptions& options = ReleaseOptions()) noexcept
    BLOBSTORE_RELEASES(blobstore::pull(url, directory, download, options));
Result<Collected> gc(const std::string& directory, uint64_t keep = 1) noexcept
    BLOBSTORE_RELEASES(blobstore::gc(directory, keep));
Result<std::shared_ptr<Release>> open_release(
    const std::string& directory, const OpenOptions& options = OpenOptions()) noexcept
    BLOBSTORE_RELEASES(Release::open(directory, options));
Result<Followed> follow(Release& release, FollowAdapters adapters = FollowAdapters::Keep) noexcept
    BLOBSTORE_RELEASES(release.follow(adapters));

#endif

} // namespace nothrow
} // namespace blobstore
