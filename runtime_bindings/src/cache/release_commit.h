// The commit of a newer release, and what it means for adapters.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/releases.h>

namespace blobstore::internal {

/// What is to be committed, and what became of it.
struct ReleaseCommit {
  std::shared_ptr<BlobCache> cache;
  FollowAdapters choice = FollowAdapters::Keep;
  std::map<std::string, std::string> before; // the paths of the adapters of the release so far, by name
  std::map<std::string, std::string> after; // those of the newer one
  /// What the release so far has under keys that are dirty.
  struct Bytes {
    const void* data;
    size_t size;
  };
  std::map<std::string, Bytes> held;
  std::vector<Change> changes; // what differs; afterwards what was committed, whose bytes may be gone

  uint64_t generation = 0;
  std::vector<std::string> reasons; // why nothing was committed
  std::vector<std::string> adapters; // as in `Followed`
  std::vector<std::string> unfit;
};

/// Commits if all adapters fit. The room of adapters, which is above those of caches and releases, sets it when
/// adapters are used; until then it is null.
extern std::atomic<void (*)(ReleaseCommit&)> commit_release_under_adapters;

} // namespace blobstore::internal
