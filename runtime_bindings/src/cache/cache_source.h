// A cache as a source of blobs.
#pragma once

#include <memory>
#include <string>

#include <blobstore/cache.h>
#include <blobstore/reading.h>

#include "format/blob_source.h"

namespace blobstore::internal {

/// Does not own the cache. `hold` blocks as a Reading does.
class CacheSource final : public BlobSource {
 public:
  explicit CacheSource(const BlobCache& cache) : cache_(cache) {}

  const std::string& name() const override { return cache_.name(); }
  size_t size() const override { return cache_.size(); }
  std::string_view key(size_t index) const override { return cache_.blob(index).key; }
  std::optional<SourceBlob> find(std::string_view key) const override {
    const Blob* blob = cache_.find(key);
    if (blob == nullptr) {
      return std::nullopt;
    }
    return SourceBlob{blob->data, blob->size, &blob->layout};
  }
  std::shared_ptr<const void> hold() const override { return std::make_shared<BlobCache::Reading>(cache_); }

 private:
  const BlobCache& cache_;
};

} // namespace blobstore::internal
