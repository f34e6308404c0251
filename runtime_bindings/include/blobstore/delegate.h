// The delegate "BlobStoreBackend": another backend, whose weights can change while it is loaded.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/error.h>

namespace blobstore {

/// Make the delegate known to ExecuTorch in this process; again does nothing. Loading a `Program` does it too.
///
/// Such a delegate has the payload of an inner backend, which packs weights when it is initialized. It takes part in
/// the commits of its cache: while the old weights are running, the inner backend is initialized anew from the new
/// bytes. What did not change is found packed already, the new handle takes the place of the old one when the bytes
/// change, and the old one goes last. If that fails, so does the commit. A change by another process is found by the
/// next call.
///
/// After a fork the child may run and change its delegates; each makes itself a new handle at its first call.
///
/// Options of a load go to the inner backend, but not `packed_cache_path` (nor one that XNNPACK has for the process): the
/// names that weights are packed under count versions in this process, and at the next launch they stand for others.
///
/// Packed weights are shared by all delegates of this process that take the same blobs, in the same versions, from the
/// same cache. They are never shared by two caches, unless one is the base of the other.
void register_delegate();

/// While it lives, delegates that this thread initializes take their blobs from the cache, and follow its commits, before
/// they look into the data files that ExecuTorch was given. They hold the cache. `Program` does it for its methods; for
/// ExecuTorch's own runtime it is the user's to do. May be nested.
class CacheScope {
 public:
  /// @param served whether methods of ExecuTorch's own runtime are loaded here; `served_delegates` lists their delegates.
  explicit CacheScope(std::shared_ptr<const BlobCache> cache, bool served = true);
  ~CacheScope();
  CacheScope(const CacheScope&) = delete;
  CacheScope& operator=(const CacheScope&) = delete;

 private:
  std::shared_ptr<const BlobCache> before_;
  bool served_before_;
};

/// A delegate that lives, and that ExecuTorch's own runtime loaded in a `CacheScope`.
struct ServedDelegate {
  std::string method;
  std::string program; // the file that its program is mapped from; empty if it is not, or the system does not say
  uint64_t inode = 0; // of that file
  std::vector<std::string> keys; // of the blobs that it takes from the cache
  std::vector<std::string> others; // of those that it takes from elsewhere
  std::vector<uint64_t> same_files; // ids of caches that it takes blobs from, and whose file ExecuTorch maps as well
  std::vector<uint64_t> other_files; // ids of those for which ExecuTorch has the blobs elsewhere, or not at all
};
/// Those on a cache, or on one that has it as its base.
std::vector<ServedDelegate> served_delegates(const BlobCache& cache);

/// Why a delegate failed last on this thread; ExecuTorch itself gives a number only.
struct DelegateFailure {
  ErrorKind kind;
  std::string reason;
};
/// @returns it once; nothing if none failed since.
std::optional<DelegateFailure> take_delegate_failure();

/// Counted over all delegates of this process.
struct DelegateStats {
  uint64_t handles = 0; // delegates that are loaded now
  uint64_t inits = 0; // how often an inner backend was initialized
  uint64_t names = 0; // versions of blobs that are in use now
};
DelegateStats delegate_stats();

} // namespace blobstore
