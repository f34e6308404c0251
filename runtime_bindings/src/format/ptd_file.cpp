#include "format/ptd_file.h"

#include <cstring>

#include <blobstore/error.h>

#include "os/text.h"

namespace blobstore::internal {

PtdFile::PtdFile(const std::string& path, Mapping::Kind kind)
    : file_(path, /*writable=*/false), size_of_file_(file_.size()) {
  if (size_of_file_ == 0) {
    throw_error_in(ErrorKind::InvalidFile, path, "the file is empty");
  }
  map_ = Mapping(file_, 0, size_of_file_, kind);
  read();
}

PtdFile::PtdFile(const std::string& path, Mapping map, uint64_t size)
    : file_(path, /*descriptor=*/-1), size_of_file_(size), map_(std::move(map)) {
  read();
}

void PtdFile::read() {
  table_ = read_ptd(name(), map_.data(), size_of_file_);
  index_.reserve(table_.entries.size());
  for (size_t i = 0; i < table_.entries.size(); ++i) {
    index_.emplace(table_.entries[i].key, i);
  }
}

std::optional<size_t> PtdFile::index_of(std::string_view key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? std::nullopt : std::optional<size_t>(found->second);
}

SourceBlob PtdFile::blob(size_t index) const {
  const PtdEntry& entry = table_.entries[index];
  const PtdSegment& segment = table_.segments[entry.segment];
  return {map_.data() + segment.start, static_cast<size_t>(segment.size), &entry.layout};
}

std::optional<SourceBlob> PtdFile::find(std::string_view key) const {
  const std::optional<size_t> index = index_of(key);
  return index ? std::optional<SourceBlob>(blob(*index)) : std::nullopt;
}

std::optional<Digest> PtdFile::recorded_digest(size_t index) const {
  if (!has_digests()) {
    return std::nullopt;
  }
  return table_.segments[table_.entries[index].segment].digest;
}

bool PtdFile::verify() const {
  check_length();
  return verify_ptd(name(), map_.data(), table_);
}

void check_same(
    std::string_view key, const PtdFile& one, const SourceBlob& a, const PtdFile& other, const SourceBlob& b) {
  if (*a.layout != *b.layout) {
    throw_error(
        ErrorKind::KeyConflict,
        "key '{}' is {} in {} but {} in {}",
        key,
        to_string(*a.layout),
        one.name(),
        to_string(*b.layout),
        other.name());
  }
  if (a.size != b.size || std::memcmp(a.data, b.data, a.size) != 0) {
    throw_error(ErrorKind::KeyConflict, "key '{}' has different bytes in {} and in {}", key, one.name(), other.name());
  }
}

} // namespace blobstore::internal
