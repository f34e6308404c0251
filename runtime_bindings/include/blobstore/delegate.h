// The delegate "BlobStoreBackend": it wraps another backend, whose weights can then change while it is loaded.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/error.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

/// Register the delegate with ExecuTorch in this process. Further calls do nothing. Loading a `Program` registers it
/// too. Any thread may call it.
///
/// Such a delegate holds the payload of an inner backend, which packs weights when it is initialized. It takes part in
/// the commits of its cache: while calls run on the old weights, it initializes the inner backend again from the new
/// bytes, and weights that did not change are found already packed. The new handle replaces the old one when the bytes
/// change, and the old one is destroyed after that. If the initialization fails, the commit fails. The next call
/// notices a change by another process.
///
/// After a fork the child may run and change its delegates. Each makes a new handle at its first call.
///
/// Options of a load are passed to the inner backend. With a `packed_cache_path`, weights are named by content, so the
/// file stays right after updates and later launches. A path that XNNPACK has for the whole process has no effect:
/// other names count versions in this process, and would stand for other weights after the next launch.
///
/// Delegates of this process share packed weights if they take the same blobs, in the same versions, from the same
/// cache. Two caches do so only if one is the base of the other, or if a packed store keeps the weights; see packed.h.
void register_delegate();

/// While it lives, delegates that this thread initializes look for blobs in the cache first, and then in the data files
/// that ExecuTorch was given. They follow the commits of the cache and hold it. `Program` creates a scope for its
/// methods; users of ExecuTorch's own runtime create their own. May be nested; must be destroyed by the thread that
/// made it.
class CacheScope {
 public:
  /// @param served whether ExecuTorch's own runtime loads methods here; `served_delegates` lists their delegates.
  explicit CacheScope(std::shared_ptr<const BlobCache> cache, bool served = true);
  ~CacheScope();
  CacheScope(const CacheScope&) = delete;
  CacheScope& operator=(const CacheScope&) = delete;

 private:
  std::shared_ptr<const BlobCache> before_;
  bool served_before_;
};

/// A living delegate that ExecuTorch's own runtime loaded in a `CacheScope`.
struct ServedDelegate {
  std::string method;
  std::string program; // the file that its program is mapped from; empty if it is not mapped, or this system cannot say
  uint64_t inode = 0; // of that file
  std::vector<std::string> keys; // of the blobs that it takes from the cache
  std::vector<std::string> others; // of the blobs that it takes from elsewhere
  std::vector<uint64_t> same_files; // ids of working copies that it takes blobs from, if ExecuTorch maps the same file
  std::vector<uint64_t> other_files; // ids of the other caches: ExecuTorch has their blobs elsewhere, or not at all
};
/// The delegates on a cache, or on caches on top of it. Any thread may call it.
std::vector<ServedDelegate> served_delegates(const BlobCache& cache);

/// Why a delegate failed. ExecuTorch itself gives only a number.
struct DelegateFailure {
  ErrorKind kind;
  std::string reason;
};
/// The last failure of a delegate on this thread. Each failure is returned once; empty if there was none since.
std::optional<DelegateFailure> take_delegate_failure();

/// Counts over all delegates of this process.
struct DelegateStats {
  uint64_t handles = 0; // delegates that exist now
  uint64_t inits = 0; // number of initializations of inner backends so far
  uint64_t names = 0; // versions of blobs in use now
};
DelegateStats delegate_stats();

} // namespace blobstore
