#include "delegate/packing.h"

#include <cstring>
#include <utility>
#include <vector>

#include <executorch/runtime/backend/interface.h>

#include "cache/mapped_cache.h"
#include "os/code_identity.h"
#include "os/memory_usage.h"

namespace blobstore::internal {
namespace {

thread_local Packing* in_force = nullptr;

} // namespace

std::optional<Digest> packing_runtime() {
  const executorch::runtime::BackendInterface* backend = executorch::runtime::get_backend_class(kXnnpack);
  if (backend == nullptr) {
    return std::nullopt;
  }
  static const std::string build = [&] {
    const void* functions = nullptr; // of the class, which lie in the library that has XNNPACK
    std::memcpy(static_cast<void*>(&functions), static_cast<const void*>(backend), sizeof functions);
    return build_of(functions);
  }();
  if (build.empty()) {
    return std::nullopt;
  }
  const std::string text = build + '\0' + processor_kind();
  return digest(text.data(), text.size());
}

const BlobCache& lowest(const BlobCache& cache) {
  const BlobCache* each = &cache;
  while (each->base() != nullptr) {
    each = each->base().get();
  }
  return *each;
}

std::optional<Digest> contents_of(const BlobCache& cache) {
  Hasher hasher;
  for (size_t i = 0; i < cache.size(); ++i) {
    const Blob& blob = cache.blob(i);
    hasher.update(blob.key.data(), blob.key.size() + 1);
    hasher.update(&blob.size, sizeof blob.size);
    const std::optional<std::string> content = cache.file_digest(blob.key);
    if (!content) {
      return std::nullopt;
    }
    hasher.update(content->data(), content->size());
  }
  return hasher.digest();
}

std::optional<Digest> foundation_of(const BlobCache& cache) {
  const BlobCache& foundation = lowest(cache);
  if (foundation.mode() == BlobCache::Mode::Shared) {
    return identity_of(static_cast<const MappedCache&>(foundation));
  }
  return contents_of(foundation);
}

HeapGrowth::HeapGrowth() : before_(anonymous_memory()) {}

std::optional<uint64_t> HeapGrowth::bytes() const {
  const std::optional<uint64_t> now = anonymous_memory();
  if (!now || !before_) {
    return std::nullopt;
  }
  return *now > *before_ ? *now - *before_ : 0;
}

Packing::Packing(std::shared_ptr<PackedFolder> folder) : store(std::move(folder)), before_(in_force) {
  in_force = this;
}

Packing::~Packing() {
  in_force = before_;
}

Packing* Packing::current() {
  return in_force;
}

bool Packing::wants(std::string_view entry) const {
  const auto known = [&](std::string_view name) { return names.find(std::string(name)) != names.end(); };
  if (known(entry)) {
    return true;
  }
  for (size_t end = 1; end < entry.size(); ++end) {
    if (known(entry.substr(0, end)) && known(entry.substr(end))) {
      return true;
    }
  }
  return false;
}

} // namespace blobstore::internal
