// ExecuTorch's NamedDataMap over a cache.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/cache.h>

namespace blobstore {

/// What programs and their delegates are given to find blobs in.
///
/// All calls may come from any thread at any time. A buffer of `get_data` holds the cache: its address is the blob's
/// own, stays valid until the buffer is freed, even if the cache is closed, and its bytes change only in commits, which
/// wait for running methods. Whoever keeps the pointer without the buffer must hold the cache in another way.
class CacheDataMap final : public executorch::runtime::NamedDataMap {
 public:
  explicit CacheDataMap(std::shared_ptr<const BlobCache> cache) : cache_(std::move(cache)) {}

  const std::shared_ptr<const BlobCache>& cache() const { return cache_; }

  /// Of a tensor; InvalidType for opaque bytes, NotFound for an unknown key. It refers to memory of the cache.
  ET_NODISCARD executorch::runtime::Result<const executorch::runtime::TensorLayout> get_tensor_layout(
      std::string_view key) const override;
  /// NotFound for an unknown key.
  ET_NODISCARD executorch::runtime::Result<executorch::runtime::FreeableBuffer> get_data(
      std::string_view key) const override;
  /// Writes exactly the blob's bytes, of one generation; InvalidArgument, and nothing written, if `size` is another.
  ET_NODISCARD executorch::runtime::Error load_data_into(std::string_view key, void* buffer, size_t size)
      const override;
  ET_NODISCARD executorch::runtime::Result<uint32_t> get_num_keys() const override;
  ET_NODISCARD executorch::runtime::Result<const char*> get_key(uint32_t index) const override;

  /// Collects the keys that this thread looks up in vain while it lives, for error messages.
  class Misses {
   public:
    Misses();
    ~Misses();
    const std::vector<std::string>& keys() const { return keys_; }

   private:
    friend class CacheDataMap;
    std::vector<std::string> keys_;
    Misses* before_;
  };

 private:
  const Blob* find(std::string_view key) const;

  std::shared_ptr<const BlobCache> cache_;
};

} // namespace blobstore
