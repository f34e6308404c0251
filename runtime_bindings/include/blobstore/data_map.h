// ExecuTorch's NamedDataMap on a cache.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/cache.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

/// The map in which programs and their delegates look for blobs. Holds the cache.
///
/// Threads: any thread may call any function at any time. Only `load_data_into` blocks, while a commit changes bytes.
/// Ownership: a buffer of `get_data` holds the cache. Its address is the blob's and stays valid until the buffer is
/// freed, even if the cache is closed. Its bytes change only in commits, which wait for running methods. Code that
/// keeps the pointer without the buffer must hold the cache in another way.
class CacheDataMap final : public executorch::runtime::NamedDataMap {
 public:
  explicit CacheDataMap(std::shared_ptr<const BlobCache> cache) : cache_(std::move(cache)) {}

  const std::shared_ptr<const BlobCache>& cache() const { return cache_; }

  /// The layout of a tensor; InvalidType for opaque bytes, NotFound for an unknown key. Refers to memory of the cache.
  ET_NODISCARD executorch::runtime::Result<const executorch::runtime::TensorLayout> get_tensor_layout(
      std::string_view key) const override;
  /// The bytes of a blob, not copied; NotFound for an unknown key.
  ET_NODISCARD executorch::runtime::Result<executorch::runtime::FreeableBuffer> get_data(
      std::string_view key) const override;
  /// Copy a blob, all bytes of one generation. If `size` is not that of the blob, nothing is written: InvalidArgument.
  ET_NODISCARD executorch::runtime::Error load_data_into(
      std::string_view key, void* buffer, size_t size) const override;
  ET_NODISCARD executorch::runtime::Result<uint32_t> get_num_keys() const override;
  ET_NODISCARD executorch::runtime::Result<const char*> get_key(uint32_t index) const override;

  /// While it lives, collects the keys that this thread looked up without success, for error messages. May be nested.
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
