#include <blobstore/cache.h>

#include <atomic>

#include "cache/thread_readings.h"
#include "format/constants.h"
#include "format/ptd_reader.h"
#include "os/file.h"
#include "os/text.h"

namespace blobstore {

using namespace internal;
namespace {

std::atomic<uint64_t> next_id{1};

} // namespace

BlobCache::BlobCache(Mode mode, std::string name, std::shared_ptr<BlobCache> base, std::shared_ptr<PackedStore> packed)
    : id_(next_id.fetch_add(1)),
      mode_(mode),
      name_(std::move(name)),
      base_(std::move(base)),
      packed_(std::move(packed)) {
  if (packed_ == nullptr && base_ != nullptr) {
    packed_ = base_->packed();
  }
  ThreadReadings::watch_forks();
}

const Blob& BlobCache::at(std::string_view key) const {
  check_open();
  const Blob* blob = find(key);
  if (blob == nullptr) {
    throw_missing(key);
  }
  return *blob;
}

void BlobCache::throw_missing(std::string_view key) const {
  throw_error_in(ErrorKind::KeyNotFound, name_, "no key '{}' among {} keys", key, size());
}

void BlobCache::check_open() const {
  if (closed()) {
    throw_error_in(ErrorKind::Closed, name_, "the cache is closed");
  }
}

uint64_t BlobCache::load(const std::string& path) {
  check_open();
  const File file(path, false);
  const uint64_t size = file.size();
  if (size == 0) {
    throw_error_in(ErrorKind::InvalidFile, path, "the file is empty");
  }
  const Mapping map(size);
  file.read(map.data(), size, 0);
  const PtdTable table = read_ptd(path, map.data(), size);
  verify_ptd(path, map.data(), table);
  std::vector<Change> changes;
  for (const PtdEntry& entry : table.entries) {
    if (entry.key.rfind(kKeyPrefix, 0) == 0 && !owns(entry.key)) {
      continue; // a record about other blobs, which this cache never had
    }
    const PtdSegment& segment = table.segments[entry.segment];
    changes.push_back({entry.key, map.data() + segment.start, segment.size, &entry.layout});
  }
  try {
    return update(changes);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::KeyNotFound || error.kind() == ErrorKind::Layout) {
      throw_error_in(error.kind(), path, "{}", error.what());
    }
    throw;
  }
}

} // namespace blobstore
