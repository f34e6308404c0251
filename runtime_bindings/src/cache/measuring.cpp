// What changed, what memory the cache takes, and whether its bytes are what the files say.

#include "cache/mapped_cache.h"
#include "format/digest.h"
#include "format/ptd_reader.h"
#include "os/memory_usage.h"

namespace blobstore::internal {

std::vector<std::string> MappedCache::dirty() const {
  check_open();
  std::vector<std::string> keys;
  const Reading reading(*this); // not commit_: a commit holds that while it waits for readers, perhaps for this thread
  for (const auto& slot : blobs_.slots()) {
    if (is_dirty(*slot)) {
      keys.push_back(slot->key);
    }
  }
  return keys;
}

CacheStats MappedCache::stats() const {
  check_open();
  CacheStats stats;
  stats.keys = size();
  const std::vector<MemoryRange> ranges = blobs_.ranges();
  for (const MemoryRange& range : ranges) {
    stats.mapped_bytes += range.length;
  }
  if (const auto usage = memory_usage(ranges)) {
    stats.resident_bytes = usage->resident;
    stats.private_bytes = usage->own;
  }
  {
    const Reading reading(*this);
    for (const auto& slot : blobs_.slots()) {
      if (is_dirty(*slot)) {
        ++stats.dirty_keys;
        stats.dirty_bytes += slot->size;
      }
    }
  }
  stats.lookups = lookups_.load(std::memory_order_relaxed);
  stats.misses = misses_.load(std::memory_order_relaxed);
  stats.commits = commits_.load(std::memory_order_relaxed);
  stats.reverts = reverts_.load(std::memory_order_relaxed);
  return stats;
}

std::optional<std::string> MappedCache::recorded_digest(std::string_view key) const {
  check_open();
  const Slot* slot = blobs_.find(key);
  if (slot == nullptr) {
    return base() ? base()->recorded_digest(key) : std::nullopt;
  }
  if (!blobs_.source_of(*slot).table.manifest || version_of(*slot) != 0) {
    return std::nullopt;
  }
  const Digest& digest = blobs_.segment_of(*slot).digest;
  return std::string(digest.begin(), digest.end());
}

std::optional<std::string> MappedCache::file_digest(std::string_view key) const {
  const Slot* slot = blobs_.find(key);
  if (slot == nullptr) {
    if (base() == nullptr) {
      throw_missing(key);
    }
    return base()->file_digest(key);
  }
  Digest found{};
  if (blobs_.source_of(*slot).table.manifest) {
    found = blobs_.segment_of(*slot).digest;
  } else {
    const std::lock_guard<std::mutex> guard(digests_mutex_);
    auto known = digests_.find(slot);
    if (known == digests_.end()) {
      Mapping original;
      const uint8_t* bytes = slot->data;
      if (is_dirty(*slot) && slot->pages) {
        const File& file = blobs_.source_of(*slot).file;
        const uint64_t start = blobs_.segment_of(*slot).start;
        file.check_length(start + slot->size);
        original = Mapping(file, start, slot->size, Mapping::Kind::ReadOnly);
        bytes = original.data();
      } else if (is_dirty(*slot)) {
        if (working_copy_ != nullptr || slot->original.size() != slot->size) {
          return std::nullopt;
        }
        bytes = slot->original.data();
      }
      known = digests_.emplace(slot, digest(bytes, slot->size)).first;
    }
    found = known->second;
  }
  return std::string(found.begin(), found.end());
}

bool MappedCache::differs_from_file(std::string_view key) const {
  const Slot* slot = blobs_.find(key);
  if (slot != nullptr) {
    return is_dirty(*slot);
  }
  if (base() == nullptr) {
    throw_missing(key);
  }
  return base()->differs_from_file(key);
}

void MappedCache::check_files() const {
  check_open();
  if (mode() == Mode::Copy) {
    return;
  }
  for (const Source& source : blobs_.sources()) {
    source.file.check_length(source.size);
  }
}

bool MappedCache::verify() const {
  check_files();
  const Reading reading(*this);
  bool all = true;
  for (const Source& source : blobs_.sources()) {
    if (!source.table.manifest) {
      all = false;
      continue;
    }
    PtdTable table = source.table;
    if (working_copy_) { // commits keep the manifest up to date
      table = read_ptd(source.path, source.map.data(), source.size);
    }
    for (const auto& slot : blobs_.slots()) {
      if (&blobs_.source_of(*slot) == &source && slot->dirty && slot->first_of_segment) { // it was changed here
        PtdSegment& segment = table.segments[slot->segment];
        segment.digest = digest(source.map.data() + segment.start, segment.size);
      }
    }
    verify_ptd(source.path, source.map.data(), table);
  }
  return all && (!base() || base()->verify());
}

} // namespace blobstore::internal
