// What a newer release of a foundation means for the adapters that are loaded above it.
#pragma once

#include "cache/release_commit.h"

namespace blobstore::internal {

/// Commit what differs between two releases, and with it the release's own adapters; or nothing, if a loaded adapter
/// does not fit. @throws Error as `BlobCache::update`; Unsupported: this thread reads the cache.
void commit_release(ReleaseCommit& commit);

} // namespace blobstore::internal
