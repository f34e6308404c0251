#include "cache/opened_files.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cache/mapped_cache.h"
#include "format/text_hash.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// Whether a blob in memory, which no commit changed, has the bytes of the file. Those behind digests are not read.
bool is_same(const BlobCache& cache, const PtdFile& file, size_t index) {
  const std::string& key = file.entry(index).key;
  const Blob* blob = cache.find(key);
  const SourceBlob stored = file.blob(index);
  if (blob == nullptr || blob->size != stored.size) {
    return false;
  }
  const auto known = cache.recorded_digest(key);
  const auto recorded = file.recorded_digest(index);
  if (known && recorded) {
    return std::equal(known->begin(), known->end(), recorded->begin(), recorded->end(), [](char a, uint8_t b) {
      return static_cast<uint8_t>(a) == b;
    });
  }
  return std::memcmp(blob->data, stored.data, stored.size) == 0;
}

void check_unchanged(const BlobCache& cache, const PtdFile& file, const TextSet& dirty) {
  for (size_t i = 0; i < file.size(); ++i) {
    const std::string& key = file.entry(i).key;
    if (dirty.count(key) == 0 && !is_same(cache, file, i)) {
      throw_error_in(
          ErrorKind::DataChanged,
          file.name(),
          "the file was overwritten after the cache was opened: '{}' differs",
          key);
    }
  }
}

} // namespace

std::vector<std::unique_ptr<PtdFile>> opened_files(const BlobCache& cache) {
  const std::vector<std::string> changed = cache.dirty();
  const TextSet dirty(changed.begin(), changed.end());
  std::vector<std::unique_ptr<PtdFile>> files;
  for (const Source& source : mapped(cache).placed().sources()) {
    source.file.check_length(source.size);
    Mapping map(source.file, 0, source.size, Mapping::Kind::ReadOnly);
    files.push_back(std::make_unique<PtdFile>(source.path, std::move(map), source.size));
    if (cache.mode() != BlobCache::Mode::Shared) {
      check_unchanged(cache, *files.back(), dirty);
    }
  }
  return files;
}

} // namespace blobstore::internal
