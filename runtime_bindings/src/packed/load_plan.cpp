#include "packed/load_plan.h"

#include <cstring>
#include <utility>
#include <vector>

#include <executorch/runtime/backend/interface.h>

#include "cache/mapped_cache.h"
#include "os/code_identity.h"
#include "os/memory_usage.h"

namespace blobstore::internal {
namespace {

constexpr char kRules[] = "3"; // of what is kept in a file; another number makes new files

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
  const std::string text = build + '\0' + processor_kind() + '\0' + kRules;
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
    return identity_of(mapped(foundation));
  }
  return contents_of(foundation);
}

std::set<std::string> packed_again(const ScratchFile& packed, const std::function<void()>& load_again) {
  const StockPacked first(packed);
  if (first.entries.empty()) {
    return {};
  }
  load_again();
  const uint64_t after = packed.file().size();
  if (after == first.size) {
    return {};
  }
  const Mapping second(packed.file(), 0, after, Mapping::Kind::ReadOnly);
  std::set<std::string> again;
  for (uint64_t at = align_up(first.size, page_size()); at < after; at += page_size()) { // where ExecuTorch may pack to
    for (const PackedEntry& entry : first.entries) {
      if (entry.size <= after - at && std::memcmp(first.bytes_of(entry), second.data() + at, entry.size) == 0) {
        again.insert(entry.name);
      }
    }
  }
  return again;
}

std::string Packing::path() const {
  if (scratch != nullptr) {
    return scratch->path();
  }
  return file != nullptr ? file->path() : std::string();
}

HeapGrowth::HeapGrowth() : before_(anonymous_memory()) {}

std::optional<uint64_t> HeapGrowth::bytes() const {
  const std::optional<uint64_t> now = anonymous_memory();
  if (!now || !before_) {
    return std::nullopt;
  }
  return *now > *before_ ? *now - *before_ : 0;
}

bool LoadResult::wants(std::string_view entry) const {
  const auto has = [&](std::string_view name) { return names.find(std::string(name)) != names.end(); };
  if (again.count(std::string(entry)) != 0) {
    return false;
  }
  if (has(entry)) {
    return true;
  }
  for (size_t end = 1; end < entry.size(); ++end) {
    if (has(entry.substr(0, end)) && has(entry.substr(end))) {
      return true;
    }
  }
  return false;
}

PackedMade LoadResult::made() {
  return {[this](std::string_view name) { return wants(name); }, std::move(covers), std::move(maps), std::move(keys)};
}

} // namespace blobstore::internal
