#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using executorch::extension::TensorPtr;
using executorch::runtime::EValue;
using executorch::runtime::MethodMeta;
using internal::attempt;

Result<std::shared_ptr<Program>> load_program(
    const std::string& path, std::shared_ptr<BlobCache> cache, const std::shared_ptr<PackedStore>& packed) noexcept {
  return attempt([&] { return Program::load(path, std::move(cache), packed); });
}

Result<MethodMeta> method_meta(const Program& program, const std::string& method) noexcept {
  return attempt([&] { return program.method_meta(method); });
}

Result<std::shared_ptr<Method>> load_method(Program& program, const std::string& name) noexcept {
  return attempt([&] { return program.load_method(name); });
}

Result<Outputs> execute(Method& method, const std::vector<EValue>& inputs, const RunOptions& options) noexcept {
  return attempt([&] { return method.execute(inputs, options); });
}

Result<Outputs> forward(Program& program, const std::vector<EValue>& inputs, const RunOptions& options) noexcept {
  return attempt([&] { return program.forward(inputs, options); });
}

Result<TensorPtr> output_memory(Method& method, size_t index) noexcept {
  return attempt([&] { return method.output_memory(index); });
}

Result<std::vector<std::pair<std::string, TensorPtr>>> state_memory(Method& method) noexcept {
  return attempt([&] { return method.state_memory(); });
}

Result<std::vector<std::string>> needs(const Program& program, const std::string& method) noexcept {
  return attempt([&] { return program.needs(method); });
}

Result<std::vector<std::string>> input_names(const Program& program, const std::string& method) noexcept {
  return attempt([&] { return program.input_names(method); });
}

Result<std::vector<std::string>> backends(const Program& program, const std::string& method) noexcept {
  return attempt([&] { return program.backends(method); });
}

} // namespace nothrow
} // namespace blobstore
