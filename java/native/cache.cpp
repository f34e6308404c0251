// BlobCache in Java.
#include <cstring>

#include <blobstore/cache.h>
#include <blobstore/packed.h>
#include <blobstore/reading.h>

#include "crossing.h"

namespace blobstore::java {
namespace {

std::shared_ptr<BlobCache> open(
    const Paths& paths, BlobCache::Mode mode, std::shared_ptr<BlobCache> base, std::shared_ptr<PackedStore> packed) {
  return BlobCache::open(paths.all, mode, std::move(base), std::move(packed));
}

std::vector<std::string> keys(const BlobCache& cache) {
  std::vector<std::string> found;
  for (size_t i = 0; i < cache.size(); ++i) {
    found.push_back(cache.blob(i).key);
  }
  return found;
}

bool contains(const BlobCache& cache, std::string_view key) {
  return cache.find(key) != nullptr;
}

NewTensor blob(JNIEnv* env, const BlobCache& cache, std::string_view key) {
  const Blob& found = cache.at(key);
  if (!found.layout && found.size > INT32_MAX) {
    throw Error(ErrorKind::UnsupportedData, "'" + found.key + "' is larger than a ByteBuffer can be");
  }
  NewTensor made = new_tensor(env, found.layout ? *found.layout : Layout{0, {static_cast<int32_t>(found.size)}, {}});
  if (found.size != 0) {
    const BlobCache::Reading reading(cache);
    std::memcpy(made.data, found.data, found.size);
  }
  return made;
}

uint64_t update(BlobCache& cache, const StateDict& blobs) {
  std::vector<Change> changes;
  for (const auto& [key, tensor] : blobs) {
    const Blob* const blob = cache.find(key);
    const bool opaque = blob != nullptr && !blob->layout; // takes any tensor of its size
    changes.push_back(opaque ? Change(key, tensor->const_data_ptr(), tensor->nbytes()) : Change(key, tensor));
  }
  return cache.update(changes);
}

uint64_t load(BlobCache& cache, const Path& path) {
  return cache.load(path.text);
}

uint64_t revert(BlobCache& cache) {
  return cache.revert();
}

uint64_t revert_keys(BlobCache& cache, const std::vector<std::string>& keys) {
  return cache.revert(keys);
}

uint64_t save(const BlobCache& cache, const Path& path, bool dirty_only) {
  return cache.save(path.text, dirty_only);
}

std::vector<jlong> stats(const BlobCache& cache) {
  const CacheStats found = cache.stats();
  const auto measured = [](const std::optional<uint64_t>& value) { return value ? static_cast<jlong>(*value) : -1; };
  return {
      static_cast<jlong>(found.keys),
      static_cast<jlong>(found.mapped_bytes),
      measured(found.resident_bytes),
      measured(found.private_bytes),
      static_cast<jlong>(found.dirty_keys),
      static_cast<jlong>(found.dirty_bytes),
      static_cast<jlong>(found.commits),
      static_cast<jlong>(found.reverts)};
}

uint64_t working_copy(const Paths& paths, const Path& target) {
  return make_working_copy(paths.all, target.text);
}

} // namespace

std::vector<Row> cache_rows() {
  return {
      row<&open>("openCache"),
      row<&BlobCache::name>("cacheName"),
      row<&keys>("cacheKeys"),
      row<&contains>("cacheContains"),
      row<&BlobCache::owns>("cacheOwns"),
      row<&blob>("cacheBlob"),
      row<&BlobCache::generation>("cacheGeneration"),
      row<&BlobCache::version>("cacheVersion"),
      row<&update>("cacheUpdate"),
      row<&load>("cacheLoad"),
      row<&revert>("cacheRevert"),
      row<&revert_keys>("cacheRevertKeys"),
      row<&save>("cacheSave"),
      row<&BlobCache::dirty>("cacheDirty"),
      row<&BlobCache::check_files>("cacheCheckFiles"),
      row<&BlobCache::verify>("cacheVerify"),
      row<&stats>("cacheStats"),
      row<&working_copy>("makeWorkingCopy")};
}

} // namespace blobstore::java
