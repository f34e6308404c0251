#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using executorch::runtime::EValue;
using internal::attempt;

Result<std::unique_ptr<SGD>> sgd(const SGDOptions& options) noexcept {
  return attempt([&] { return std::make_unique<SGD>(options); });
}

Result<void> set_options(SGD& optimizer, const SGDOptions& options) noexcept {
  return attempt([&] { optimizer.set_options(options); });
}

Result<std::unique_ptr<AdamW>> adamw(const AdamWOptions& options) noexcept {
  return attempt([&] { return std::make_unique<AdamW>(options); });
}

Result<void> set_options(AdamW& optimizer, const AdamWOptions& options) noexcept {
  return attempt([&] { optimizer.set_options(options); });
}

Result<std::unique_ptr<MeZO>> mezo(
    std::shared_ptr<BlobCache> cache, const MeZOOptions& options, const std::vector<std::string>& names) noexcept {
  return attempt([&] { return std::make_unique<MeZO>(std::move(cache), options, names); });
}

Result<double> step(MeZO& optimizer, const std::function<double()>& loss) noexcept {
  return attempt([&] { return optimizer.step(loss); });
}

Result<void> set_options(MeZO& optimizer, const MeZOOptions& options) noexcept {
  return attempt([&] { optimizer.set_options(options); });
}

Result<std::unique_ptr<TrainingProgram>> training_program(
    std::shared_ptr<Program> program, const std::string& method) noexcept {
  return attempt([&] { return std::make_unique<TrainingProgram>(std::move(program), method); });
}

Result<Outputs> forward_backward(
    TrainingProgram& training, const std::vector<EValue>& inputs, const std::vector<bool>& in_place) noexcept {
  return attempt([&] { return training.forward_backward(inputs, in_place); });
}

Result<Outputs> step(
    TrainingProgram& training,
    Optimizer& optimizer,
    const std::vector<EValue>& inputs,
    OnNan on_nan,
    const std::vector<bool>& in_place) noexcept {
  return attempt([&] { return training.step(optimizer, inputs, on_nan, in_place); });
}

Result<void> lock(TrainingProgram& training) noexcept {
  return attempt([&] { training.lock(); });
}

Result<uint64_t> save(
    TrainingProgram& training,
    const std::string& path,
    const Optimizer* optimizer,
    const std::vector<std::string>& base,
    const std::map<std::string, std::string>& metadata) noexcept {
  return attempt([&] { return training.save(path, optimizer, base, metadata); });
}

Result<void> load(
    TrainingProgram& training,
    const std::string& path,
    Optimizer* optimizer,
    const std::vector<std::string>& base) noexcept {
  return attempt([&] { training.load(path, optimizer, base); });
}

Result<Updated> publish(TrainingProgram& training, const LogicalTensors& target, bool strict, bool finite) noexcept {
  return attempt([&] { return training.publish(target, strict, finite); });
}

Result<Updated> publish(
    TrainingProgram& training, const std::shared_ptr<BlobCache>& target, bool strict, bool finite) noexcept {
  return attempt([&] { return training.publish(target, strict, finite); });
}

} // namespace nothrow
} // namespace blobstore
