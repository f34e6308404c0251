#include <blobstore/data_map.h>

#include <cstring>
#include <new>

#include <blobstore/reading.h>

namespace blobstore BLOBSTORE_API {

using executorch::runtime::FreeableBuffer;
using executorch::runtime::Result;
using executorch::runtime::Span;
using EtError = executorch::runtime::Error;
using EtLayout = executorch::runtime::TensorLayout;

namespace {

thread_local CacheDataMap::Misses* current_misses = nullptr;

void unpin(void* context, void*, size_t) {
  delete static_cast<std::shared_ptr<const BlobCache>*>(context);
}

} // namespace

CacheDataMap::Misses::Misses() : before_(current_misses) {
  current_misses = this;
}

CacheDataMap::Misses::~Misses() {
  current_misses = before_;
}

const Blob* CacheDataMap::find(std::string_view key) const {
  const Blob* blob = cache_->find(key);
  if (blob == nullptr && current_misses != nullptr) {
    try {
      current_misses->keys_.emplace_back(key);
    } catch (const std::bad_alloc&) { // then the message lacks this key
    }
  }
  return blob;
}

Result<const EtLayout> CacheDataMap::get_tensor_layout(std::string_view key) const {
  const Blob* blob = find(key);
  if (blob == nullptr) {
    return EtError::NotFound;
  }
  if (!blob->layout) {
    return EtError::InvalidType;
  }
  const Layout& layout = *blob->layout;
  return EtLayout::create(
      Span<const int32_t>(layout.sizes.data(), layout.sizes.size()),
      Span<const uint8_t>(layout.dim_order.data(), layout.dim_order.size()),
      static_cast<executorch::aten::ScalarType>(layout.scalar_type));
}

Result<FreeableBuffer> CacheDataMap::get_data(std::string_view key) const {
  const Blob* blob = find(key);
  if (blob == nullptr) {
    return EtError::NotFound;
  }
  auto* pin = new (std::nothrow) std::shared_ptr<const BlobCache>(cache_);
  if (pin == nullptr) {
    return EtError::MemoryAllocationFailed;
  }
  return FreeableBuffer(blob->data, blob->size, &unpin, pin);
}

EtError CacheDataMap::load_data_into(std::string_view key, void* buffer, size_t size) const {
  const Blob* blob = find(key);
  if (blob == nullptr) {
    return EtError::NotFound;
  }
  if (size != blob->size || (buffer == nullptr && size != 0)) {
    return EtError::InvalidArgument;
  }
  if (size != 0) {
    try {
      const BlobCache::Reading reading(*cache_);
      std::memcpy(buffer, blob->data, size);
    } catch (const std::bad_alloc&) {
      return EtError::MemoryAllocationFailed;
    } catch (...) {
      return EtError::AccessFailed;
    }
  }
  return EtError::Ok;
}

Result<uint32_t> CacheDataMap::get_num_keys() const {
  return static_cast<uint32_t>(cache_->size());
}

Result<const char*> CacheDataMap::get_key(uint32_t index) const {
  if (index >= cache_->size()) {
    return EtError::InvalidArgument;
  }
  return cache_->blob(index).key.c_str();
}

} // namespace blobstore
