// Makes ExecuTorch's XNNPACK like that of versions without `packed_cache_path`, for test_packed_older.py: loaded in
// front of ExecuTorch, it puts itself between the registry and each backend, and takes the option out of every load.

#include <cstring>
#include <vector>

#include <dlfcn.h>

#include <executorch/runtime/backend/interface.h>

namespace executorch::ET_RUNTIME_NAMESPACE {

class Older final : public BackendInterface {
 public:
  explicit Older(BackendInterface* newer) : newer_(newer) {}

  bool is_available() const override { return newer_->is_available(); }

  Result<DelegateHandle*> init(
      BackendInitContext& context, FreeableBuffer* processed, ArrayRef<CompileSpec> specs) const override {
    std::vector<BackendOption> known;
    for (const BackendOption& option : context.runtime_specs()) {
      if (std::strcmp(option.key, "packed_cache_path") != 0) {
        known.push_back(option);
      }
    }
    BackendInitContext without(
        context.get_runtime_allocator(),
        context.event_tracer(),
        context.get_method_name(),
        context.get_named_data_map(),
        Span<const BackendOption>(known.data(), known.size()));
    return newer_->init(without, processed, specs);
  }

  Error execute(BackendExecutionContext& context, DelegateHandle* handle, Span<EValue*> arguments) const override {
    return newer_->execute(context, handle, arguments);
  }

  void destroy(DelegateHandle* handle) const override { newer_->destroy(handle); }

 private:
  BackendInterface* const newer_;
};

__attribute__((visibility("default"))) Error register_backend(const Backend& backend) {
  constexpr char kName[] = "_ZN10executorch7runtime16register_backendERKNS0_7BackendE";
  const auto next = reinterpret_cast<Error (*)(const Backend&)>(dlsym(RTLD_NEXT, kName));
  return std::strcmp(backend.name, "XnnpackBackend") == 0 ? next({backend.name, new Older(backend.backend)})
                                                          : next(backend);
}

} // namespace executorch::ET_RUNTIME_NAMESPACE
