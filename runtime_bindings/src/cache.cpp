#include <blobstore/cache.h>

#include <algorithm>
#include <atomic>

#include "file.h"
#include "ptd_reader.h"

namespace blobstore {
namespace {

struct Held {
  const BlobCache* cache;
  int depth;
};

/// What this thread reads; a handful at most.
std::vector<Held>& held() {
  thread_local std::vector<Held> caches;
  return caches;
}

Held* find_held(const BlobCache* cache) {
  for (Held& entry : held()) {
    if (entry.cache == cache) {
      return &entry;
    }
  }
  return nullptr;
}

std::atomic<uint64_t> next_id{1};

} // namespace

BlobCache::BlobCache(Mode mode, std::string name, std::shared_ptr<BlobCache> base)
    : id_(next_id.fetch_add(1)), mode_(mode), name_(std::move(name)), base_(std::move(base)) {}

const Blob& BlobCache::at(std::string_view key) const {
  check_open();
  const Blob* blob = find(key);
  if (blob == nullptr) {
    throw Error(
        ErrorKind::KeyNotFound,
        name_,
        "no key '" + std::string(key) + "' among " + std::to_string(size()) + " keys");
  }
  return *blob;
}

void BlobCache::check_open() const {
  if (closed()) {
    throw Error(ErrorKind::Closed, name_, "the cache is closed");
  }
}

uint64_t BlobCache::load(const std::string& path) {
  check_open();
  const File file(path, false);
  const uint64_t size = file.size();
  if (size == 0) {
    throw Error(ErrorKind::InvalidFile, path, "the file is empty");
  }
  const Mapping map(file, 0, size, Mapping::Kind::ReadOnly);
  const PtdTable table = read_ptd(path, map.data(), size);
  verify_ptd(path, map.data(), table);
  std::vector<Change> changes;
  for (const PtdEntry& entry : table.entries) {
    if (entry.key.rfind(kRecordPrefix, 0) == 0 && !owns(entry.key)) {
      continue; // a record about blobs, which this cache never had
    }
    const PtdSegment& segment = table.segments[entry.segment];
    changes.push_back({entry.key, map.data() + segment.start, segment.size, &entry.layout});
  }
  try {
    return update(changes);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::KeyNotFound || error.kind() == ErrorKind::Layout) {
      throw Error(error.kind(), path, error.what());
    }
    throw;
  }
}

BlobCache::Reading::Reading(const BlobCache& cache)
    : base_(cache.base() ? std::make_unique<Reading>(*cache.base()) : nullptr), cache_(cache) {
  if (Held* entry = find_held(&cache)) {
    ++entry->depth;
    return;
  }
  cache.lock_shared();
  held().push_back({&cache, 1});
}

BlobCache::Reading::~Reading() {
  Held* entry = find_held(&cache_);
  if (--entry->depth == 0) {
    std::swap(*entry, held().back());
    held().pop_back();
    cache_.unlock_shared();
  }
}

bool BlobCache::held_by_this_thread() const {
  return find_held(this) != nullptr;
}

} // namespace blobstore
