// Caches that are offered to all delegates of the process, for applications that cannot open a `CacheScope` where their
// methods are loaded.
#pragma once

#include <memory>
#include <vector>

#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/cache.h>

#include "delegate/delegate_payload.h"
#include "delegate/failure.h"

namespace blobstore::internal {

/// Offer a cache to delegates that are loaded outside of any scope, until it is withdrawn.
void offer(std::shared_ptr<const BlobCache> cache);
void withdraw(const BlobCache& cache) noexcept;

/// The offered cache that a delegate takes; null for none. Of each constant that ExecuTorch has, too, it has the same
/// bytes, now or in its file; and it has all others.
///
/// @param map may be null. @throws Failure: several have all constants that ExecuTorch lacks, so none can be chosen.
std::shared_ptr<const BlobCache> offered_for(
    const std::vector<DelegateConstant>& constants, const et::NamedDataMap* map);

} // namespace blobstore::internal
