#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using internal::attempt;

Result<std::shared_ptr<BlobCache>> open(
    const std::vector<std::string>& paths,
    BlobCache::Mode mode,
    std::shared_ptr<BlobCache> base,
    std::shared_ptr<PackedStore> packed) noexcept {
  return attempt([&] { return BlobCache::open(paths, mode, std::move(base), std::move(packed)); });
}

Result<std::unique_ptr<BlobCache::Reading>> read(const BlobCache& cache) noexcept {
  return attempt([&] { return std::make_unique<BlobCache::Reading>(cache); });
}

Result<uint64_t> update(BlobCache& cache, const std::vector<Change>& changes) noexcept {
  return attempt([&] { return cache.update(changes); });
}

Result<uint64_t> load(BlobCache& cache, const std::string& path) noexcept {
  return attempt([&] { return cache.load(path); });
}

Result<uint64_t> load_all(BlobCache& cache, const std::vector<std::string>& paths) noexcept {
  return attempt([&] { return cache.load_all(paths); });
}

Result<uint64_t> revert(BlobCache& cache) noexcept {
  return attempt([&] { return cache.revert(); });
}

Result<uint64_t> revert(BlobCache& cache, const std::vector<std::string>& keys) noexcept {
  return attempt([&] { return cache.revert(keys); });
}

Result<uint64_t> save(const BlobCache& cache, const std::string& path, bool dirty_only) noexcept {
  return attempt([&] { return cache.save(path, dirty_only); });
}

Result<uint64_t> make_working_copy(const std::vector<std::string>& paths, const std::string& target) noexcept {
  return attempt([&] { return blobstore::make_working_copy(paths, target); });
}

Result<std::vector<std::string>> dirty(const BlobCache& cache) noexcept {
  return attempt([&] { return cache.dirty(); });
}

Result<CacheStats> stats(const BlobCache& cache) noexcept {
  return attempt([&] { return cache.stats(); });
}

Result<bool> verify(const BlobCache& cache) noexcept {
  return attempt([&] { return cache.verify(); });
}

Result<uint64_t> version(const BlobCache& cache, std::string_view key) noexcept {
  return attempt([&] { return cache.version(key); });
}

Result<bool> differs_from_file(const BlobCache& cache, std::string_view key) noexcept {
  return attempt([&] { return cache.differs_from_file(key); });
}

Result<std::optional<std::string>> recorded_digest(const BlobCache& cache, std::string_view key) noexcept {
  return attempt([&] { return cache.recorded_digest(key); });
}

Result<std::optional<std::string>> file_digest(const BlobCache& cache, std::string_view key) noexcept {
  return attempt([&] { return cache.file_digest(key); });
}

Result<void> check_files(const BlobCache& cache) noexcept {
  return attempt([&] { cache.check_files(); });
}

} // namespace nothrow
} // namespace blobstore
