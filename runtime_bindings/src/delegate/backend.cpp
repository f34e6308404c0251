// What ExecuTorch calls, and what applications call around it.
#include <blobstore/delegate.h>

#include <exception>
#include <new>
#include <utility>

#include <executorch/runtime/backend/interface.h>

#include "delegate/blob_names.h"
#include "delegate/delegate.h"
#include "delegate/failure.h"
#include "delegate/inner_handle.h"
#include "delegate/load_scope.h"

namespace blobstore::internal {
namespace {

thread_local std::shared_ptr<const BlobCache> scoped_cache;
thread_local bool scope_served = false;
thread_local const LoadScope* load = nullptr;
thread_local std::optional<DelegateFailure> last_failure;

EtError report(EtError code, ErrorKind kind, const char* reason) noexcept {
  try {
    last_failure = {kind, reason};
  } catch (...) { // no memory for the reason
    last_failure.reset();
  }
  return code;
}

/// Do what ExecuTorch asked for. ExecuTorch is compiled without exceptions, so none may reach it.
template <typename Work>
EtError guard(ErrorKind kind, Work work) noexcept {
  try {
    return work();
  } catch (const Failure& failure) {
    return report(failure.code, failure.kind, failure.reason.c_str());
  } catch (const Error& error) {
    return report(EtError::AccessFailed, error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    return report(EtError::MemoryAllocationFailed, kind, "out of memory");
  } catch (const std::exception& error) {
    return report(EtError::Internal, kind, error.what());
  } catch (...) {
    return report(EtError::Internal, kind, "an exception of an unknown type");
  }
}

class BlobStoreBackend final : public et::BackendInterface {
 public:
  ~BlobStoreBackend() override = default;

  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext& context,
      et::FreeableBuffer* processed,
      et::ArrayRef<et::CompileSpec> specs) const override {
    Delegate* delegate = nullptr;
    const EtError error = guard(ErrorKind::Program, [&] {
      delegate = new Delegate(scoped_cache, scope_served, load, context, *processed, specs);
      processed->Free();
      return EtError::Ok;
    });
    if (error != EtError::Ok) {
      return error;
    }
    return static_cast<et::DelegateHandle*>(delegate);
  }

  EtError execute(et::BackendExecutionContext& context, et::DelegateHandle* handle, et::Span<et::EValue*> arguments)
      const override {
    return guard(ErrorKind::Execution, [&] { return static_cast<Delegate*>(handle)->execute(context, arguments); });
  }

  void destroy(et::DelegateHandle* handle) const override { delete static_cast<Delegate*>(handle); }
};

} // namespace

LoadScope::LoadScope(const LoadPlan& given, LoadResult& filled) : plan(given), result(filled), before_(load) {
  load = this;
}

LoadScope::~LoadScope() {
  load = before_;
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

using namespace internal;

void register_delegate() {
  static const bool done = [] {
    InnerHandle::watch_forks();
    static auto* backend = new BlobStoreBackend;
    (void)et::register_backend({kBackendId, backend});
    return true;
  }();
  (void)done;
}

CacheScope::CacheScope(std::shared_ptr<const BlobCache> cache, bool served)
    : before_(std::move(scoped_cache)), served_before_(scope_served) {
  scoped_cache = std::move(cache);
  scope_served = served;
}

CacheScope::~CacheScope() {
  scoped_cache = std::move(before_);
  scope_served = served_before_;
}

std::optional<DelegateFailure> take_delegate_failure() {
  std::optional<DelegateFailure> failure;
  std::swap(failure, last_failure);
  return failure;
}

DelegateStats delegate_stats() {
  DelegateStats stats;
  stats.handles = Delegate::count();
  stats.inits = InnerHandle::count();
  stats.names = BlobName::count();
  return stats;
}

} // namespace blobstore
