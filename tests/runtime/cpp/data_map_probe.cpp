// The five functions of ExecuTorch's NamedDataMap over a cache, in C. Results are ExecuTorch's error numbers.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <executorch/runtime/core/named_data_map.h>
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/cache.h>
#include <blobstore/data_map.h>

using blobstore::BlobCache;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;

namespace {

const NamedDataMap& map_of(const void* map) {
  return *static_cast<const blobstore::CacheDataMap*>(map);
}

} // namespace

extern "C" {

/// A map over a cache of one file; the caller must give it to `probe_close`.
void* probe_open(const char* path) {
  executorch::runtime::runtime_init();
  return new blobstore::CacheDataMap(BlobCache::open({path}));
}

void probe_close(void* map) {
  delete static_cast<blobstore::CacheDataMap*>(map);
}

uint32_t probe_num_keys(const void* map) {
  return map_of(map).get_num_keys().get();
}

/// @param key set to the NUL-terminated key, which belongs to the map.
int probe_key(const void* map, uint32_t index, const char** key) {
  const auto found = map_of(map).get_key(index);
  if (found.ok()) {
    *key = found.get();
  }
  return static_cast<int>(found.error());
}

/// @param sizes and @param order have room for 64 dimensions.
int probe_layout(
    const void* map, const char* key, size_t length, int* type, size_t* rank, int32_t* sizes, uint8_t* order) {
  const auto found = map_of(map).get_tensor_layout(std::string_view(key, length));
  if (found.ok()) {
    *type = static_cast<int>(found->scalar_type());
    *rank = found->sizes().size();
    std::copy(found->sizes().begin(), found->sizes().end(), sizes);
    std::copy(found->dim_order().begin(), found->dim_order().end(), order);
  }
  return static_cast<int>(found.error());
}

/// @param buffer set to a buffer that the caller must give to `probe_free`.
int probe_data(const void* map, const char* key, size_t length, void** buffer, const void** data, size_t* size) {
  auto found = map_of(map).get_data(std::string_view(key, length));
  if (found.ok()) {
    auto* held = new FreeableBuffer(std::move(found.get()));
    *buffer = held;
    *data = held->data();
    *size = held->size();
    return 0;
  }
  return static_cast<int>(found.error());
}

void probe_free(void* buffer) {
  delete static_cast<FreeableBuffer*>(buffer);
}

int probe_load(const void* map, const char* key, size_t length, void* buffer, size_t size) {
  return static_cast<int>(map_of(map).load_data_into(std::string_view(key, length), buffer, size));
}

} // extern "C"
