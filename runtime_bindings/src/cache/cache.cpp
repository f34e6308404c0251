#include <blobstore/cache.h>

#include <atomic>
#include <cstring>

#include "cache/release_commit.h"
#include "cache/thread_readings.h"
#include "format/constants.h"
#include "format/ptd_reader.h"
#include "format/text_hash.h"
#include "os/file.h"
#include "os/text.h"

namespace blobstore::internal {

std::atomic<void (*)(ReleaseCommit&)> commit_release_under_adapters{nullptr};

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

using namespace internal;
namespace {

std::atomic<uint64_t> next_id{1};

bool is_same(const Change& one, const Change& other) {
  return one.size == other.size && *one.layout == *other.layout &&
      (one.size == 0 || std::memcmp(one.data, other.data, one.size) == 0);
}

struct LoadedFile {
  Mapping map;
  PtdTable table;
};

/// A copy of a file, so that nobody can change it any more.
LoadedFile load_file(const std::string& path) {
  const File file(path, false);
  const uint64_t size = file.size();
  if (size == 0) {
    throw_error_in(ErrorKind::InvalidFile, path, "the file is empty");
  }
  Mapping map(size);
  file.read(map.data(), size, 0);
  PtdTable table = read_ptd(path, map.data(), size);
  verify_ptd(path, map.data(), table);
  return {std::move(map), std::move(table)};
}

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

uint64_t BlobCache::load_all(const std::vector<std::string>& paths) {
  check_open();
  std::vector<LoadedFile> files;
  files.reserve(paths.size());
  std::vector<Change> changes;
  TextMap<size_t> by_key; // positions in changes
  std::vector<const std::string*> origins; // of changes
  for (const std::string& path : paths) {
    const LoadedFile& loaded = files.emplace_back(load_file(path));
    for (const PtdEntry& entry : loaded.table.entries) {
      if (entry.key.rfind(kKeyPrefix, 0) == 0 && !owns(entry.key)) {
        continue; // a record about other blobs, which this cache never had
      }
      const PtdSegment& segment = loaded.table.segments[entry.segment];
      const Change change(entry.key, loaded.map.data() + segment.start, segment.size, &entry.layout);
      const auto [known, is_new] = by_key.emplace(entry.key, changes.size());
      if (is_new) {
        changes.push_back(change);
        origins.push_back(&path);
      } else if (const Change& other = changes[known->second]; !is_same(change, other)) {
        throw_error_in(
            ErrorKind::KeyConflict,
            path,
            "key '{}' has another layout or other bytes in {}",
            entry.key,
            *origins[known->second]);
      }
    }
  }
  try {
    return update(changes);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::KeyNotFound || error.kind() == ErrorKind::Layout) {
      throw_error_in(error.kind(), joined(paths, " + "), "{}", error.what());
    }
    throw;
  }
}

} // namespace blobstore
