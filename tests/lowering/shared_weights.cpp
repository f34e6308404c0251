// A backend that keeps the weights of several methods once, in named data; see test_multimethod.py. Its payload is the
// key of a weight, by which it multiplies its input.

#include <string>

#include <executorch/runtime/backend/interface.h>

using namespace executorch::runtime;

namespace {

class SharesWeights final : public BackendInterface {
 public:
  bool is_available() const override { return true; }

  Result<DelegateHandle*> init(
      BackendInitContext& context, FreeableBuffer* processed, ArrayRef<CompileSpec>) const override {
    const std::string key(static_cast<const char*>(processed->data()), processed->size());
    auto data = context.get_named_data_map()->get_data(key.c_str());
    if (!data.ok()) {
      return data.error();
    }
    return new FreeableBuffer(std::move(data.get()));
  }

  Error execute(BackendExecutionContext&, DelegateHandle* handle, Span<EValue*> arguments) const override {
    const auto* weight = static_cast<const float*>(static_cast<FreeableBuffer*>(handle)->data());
    const auto& in = arguments[0]->toTensor();
    const auto& out = arguments[1]->toTensor();
    for (ssize_t i = 0; i < in.numel(); ++i) {
      out.mutable_data_ptr<float>()[i] = in.const_data_ptr<float>()[i] * weight[i];
    }
    return Error::Ok;
  }

  void destroy(DelegateHandle* handle) const override { delete static_cast<FreeableBuffer*>(handle); }
};

SharesWeights backend;
const auto registered = register_backend({"SharesWeights", &backend});

} // namespace
