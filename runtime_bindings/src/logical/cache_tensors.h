#pragma once
#include <blobstore/cache.h>
#include "cache/cache_source.h"
#include "logical/updates.h"
namespace blobstore::internal {
struct Shaped { std::string_view name; int8_t scalar_type = -1; std::vector<int64_t> sizes; };
class CacheTensors {
 public:
  explicit CacheTensors(std::shared_ptr<BlobCache> cache) : cache_(cache), source_(*cache), updates_(source_) {}
  CacheTensors(const CacheTensors&) = delete;
  const std::shared_ptr<BlobCache>& cache() const { return cache_; }
  const Updates& updates() const { return updates_; }
  uint64_t update(const std::vector<Given>& given, bool finite) const {
    auto blobs = updates_.changes(given, finite);
    std::vector<Change> changes;
    for (auto& b : blobs) changes.push_back({b.key, b.bytes.data, b.bytes.nbytes, b.has_layout ? &b.layout : nullptr});
    return cache_->update(changes);
  }
  void check_reach(const std::vector<Shaped>&, bool) const {}
 private:
  std::shared_ptr<BlobCache> cache_;
  CacheSource source_;
  Updates updates_;
};
}
