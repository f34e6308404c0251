#include "cache/placed_blobs.h"

#include <algorithm>
#include <cstring>

#include "cache/working_copy.h"
#include "os/text.h"

namespace blobstore::internal {

using Mode = BlobCache::Mode;

void PlacedBlobs::open(const std::string& path) {
  Source source;
  source.path = path;
  source.file = File(path, /*writable=*/false);
  source.size = source.file.size();
  if (source.size == 0) {
    throw_error_in(ErrorKind::InvalidFile, path, "the file is empty");
  }
  if (mode_ == Mode::Private) {
    source.map = Mapping(source.file, 0, source.size, Mapping::Kind::Private);
  } else {
    source.map = Mapping(source.size);
    source.file.read(source.map.data(), source.size, 0);
  }
  source.table = read_ptd(path, source.map.data(), source.size);
  add_source(std::move(source));
}

void PlacedBlobs::open_shared(WorkingCopy& copy, const std::string& path) {
  Source source;
  source.path = path;
  copy.open([&](const File& file) {
    source.size = file.size();
    source.map = Mapping(file, 0, source.size, Mapping::Kind::Shared);
    source.table = read_ptd(path, source.map.data(), source.size);
    source.file = file.reopen();
    return source.table.entries.size();
  });
  add_source(std::move(source));
}

void PlacedBlobs::add_source(Source source) {
  sources_.push_back(std::move(source));
  add_keys(sources_.size() - 1);
}

void PlacedBlobs::add_keys(size_t number) {
  const Source& source = sources_[number];
  index_.reserve(index_.size() + source.table.entries.size());
  std::vector<bool> taken(source.table.segments.size(), false);
  copied_ = 0;
  for (size_t i = 0; i < source.table.entries.size(); ++i) {
    const PtdEntry& entry = source.table.entries[i];
    const PtdSegment& segment = source.table.segments[entry.segment];
    if (const Slot* known = find(entry.key)) {
      check_same(*known, entry, source.map.data() + segment.start, segment.size, source.path);
      continue;
    }
    auto slot = std::make_unique<Slot>();
    slot->key = entry.key;
    slot->layout = entry.layout;
    slot->size = segment.size;
    slot->alignment = entry.alignment;
    slot->source = number;
    slot->segment = entry.segment;
    slot->entry = i;
    place(*slot, source, segment, taken[entry.segment]);
    taken[entry.segment] = true;
    index_.emplace(slot->key, slot.get());
    slots_.push_back(std::move(slot));
  }
}

/// Give a blob its address: the first key of a segment lies in the map of the file, others and empty ones elsewhere.
void PlacedBlobs::place(Slot& slot, const Source& source, const PtdSegment& segment, bool taken) {
  slot.first_of_segment = !taken;
  shares_segments_ = shares_segments_ || taken;
  const bool maps_file =
      slot.size > 0 && (mode_ == Mode::Shared || (mode_ == Mode::Private && slot.size >= page_size()));
  const bool in_place = slot.size > 0 && !taken; // an empty blob lies where the next one does
  if (in_place) {
    slot.memory = source.map.data() + segment.start;
  } else if (maps_file) {
    const auto kind = mode_ == Mode::Shared ? Mapping::Kind::Shared : Mapping::Kind::Private;
    own_maps_.emplace_back(source.file, segment.start, slot.size, kind);
    slot.memory = own_maps_.back().data();
  } else { // a copy takes less than a page
    check_copies(copied_ += slot.size, source);
    slot.memory = take_memory(slot.size, slot.alignment);
    std::memcpy(slot.memory, source.map.data() + segment.start, slot.size);
  }
  slot.data = slot.memory;
  if (mode_ == Mode::Private && (in_place || maps_file)) {
    slot.pages.emplace(slot.memory, slot.size, source.file, segment.start);
  }
}

/// A small file in which very many keys share their bytes must not fill the memory.
void PlacedBlobs::check_copies(uint64_t size, const Source& source) const {
  constexpr uint64_t kAlways = uint64_t{192} << 20;
  constexpr uint64_t kTimesTheFile = 64;
  if (size > kAlways && (size - kAlways) / kTimesTheFile > source.map.length()) {
    throw_error_in(
        ErrorKind::InvalidFile,
        source.path,
        "so many keys share their bytes that copies for each of them would take more than {} bytes; the file has {}",
        size,
        source.map.length());
  }
}

uint8_t* PlacedBlobs::take_memory(size_t size, size_t alignment) {
  alignment = std::min(std::max<size_t>(alignment, 128), page_size());
  spare_used_ = align_up(spare_used_, alignment);
  if (spare_ == nullptr || spare_used_ + std::max<size_t>(size, 1) > spare_size_) {
    spare_size_ = std::max<size_t>(size, size_t{1} << 18);
    own_maps_.emplace_back(spare_size_);
    spare_ = own_maps_.back().data();
    spare_used_ = 0;
  }
  uint8_t* memory = spare_ + spare_used_;
  spare_used_ += std::max<size_t>(size, 1);
  return memory;
}

void PlacedBlobs::check_same(
    const Slot& known, const PtdEntry& entry, const uint8_t* data, size_t size, const std::string& path) const {
  const std::string& other = source_of(known).path;
  if (known.layout != entry.layout) {
    throw_error(
        ErrorKind::KeyConflict,
        "key '{}' is {} in {} but {} in {}",
        entry.key,
        to_string(known.layout),
        other,
        to_string(entry.layout),
        path);
  }
  if (known.size != size || std::memcmp(known.data, data, size) != 0) {
    throw_error(ErrorKind::KeyConflict, "key '{}' has different bytes in {} and in {}", entry.key, other, path);
  }
}

Slot* PlacedBlobs::find(std::string_view key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : found->second;
}

std::vector<MemoryRange> PlacedBlobs::ranges() const {
  std::vector<MemoryRange> ranges;
  for (const Source& source : sources_) {
    ranges.push_back({source.map.pages(), source.map.length()});
  }
  for (const Mapping& map : own_maps_) {
    ranges.push_back({map.pages(), map.length()});
  }
  return ranges;
}

bool PlacedBlobs::overlaps(const void* data, size_t size) const {
  const auto from = reinterpret_cast<uintptr_t>(data);
  const auto overlap = [&](const Mapping& map) {
    const auto pages = reinterpret_cast<uintptr_t>(map.pages());
    return from < pages + map.length() && pages < from + size;
  };
  return std::any_of(sources_.begin(), sources_.end(), [&](const Source& source) { return overlap(source.map); }) ||
      std::any_of(own_maps_.begin(), own_maps_.end(), overlap);
}

} // namespace blobstore::internal
