// A .ptd that is opened for reading only: it is mapped, its table of contents is checked, and its blobs are looked up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/blob_source.h"
#include "format/digest.h"
#include "format/ptd_reader.h"
#include "format/text_hash.h"
#include "os/file.h"

namespace blobstore::internal {

/// Owns the map: blobs are valid as long as this object, also if the file is renamed, replaced or deleted meanwhile.
/// Reading a page that was lost because the file was truncated ends the process; `check_length` detects that before.
/// Nothing blocks. Any thread may call any function at any time.
class PtdFile final : public BlobSource {
 public:
  /// Map a file and check everything except its blobs.
  ///
  /// @param kind `Private` if callers may write to their copy of the bytes.
  /// @throws Error FileAccess, InvalidFile, Integrity.
  explicit PtdFile(const std::string& path, Mapping::Kind kind = Mapping::Kind::ReadOnly);
  /// As above, for bytes that the caller has mapped, or read into memory, already.
  PtdFile(const std::string& path, Mapping map, uint64_t size);

  const std::string& name() const override { return file_.path(); }
  size_t size() const override { return table_.entries.size(); }
  std::string_view key(size_t index) const override { return table_.entries[index].key; }
  std::optional<SourceBlob> find(std::string_view key) const override;

  /// The position of a key; empty if the file does not have it.
  std::optional<size_t> index_of(std::string_view key) const;
  /// Key, layout and alignment, by the position in the file.
  const PtdEntry& entry(size_t index) const { return table_.entries[index]; }
  SourceBlob blob(size_t index) const;
  /// The digest that the file records for a blob; empty if it has no digests.
  std::optional<Digest> recorded_digest(size_t index) const;

  const PtdTable& table() const { return table_; }
  /// The whole file.
  std::pair<const uint8_t*, size_t> bytes() const { return {map_.data(), static_cast<size_t>(size_of_file_)}; }
  /// The text that was stored with the file.
  const std::map<std::string, std::string>& metadata() const { return table_.metadata; }
  bool has_digests() const { return table_.manifest.has_value(); }

  /// @throws Error FileAccess: the file was truncated since it was opened.
  void check_length() const {
    if (file_.descriptor() >= 0) {
      file_.check_length(size_of_file_);
    }
  }
  /// Compare all blobs with their digests.
  ///
  /// @returns false if the file has no digests, so that nothing was compared.
  /// @throws Error Integrity: a blob or the padding is damaged; FileAccess: the file was truncated.
  bool verify() const;

 private:
  void read();

  File file_; // only its path, if the caller gave the bytes
  uint64_t size_of_file_ = 0;
  Mapping map_;
  PtdTable table_;
  TextMap<size_t> index_;
};

/// @throws Error KeyConflict: two files have a key with different layouts or bytes.
void check_same(
    std::string_view key, const PtdFile& one, const SourceBlob& a, const PtdFile& other, const SourceBlob& b);

} // namespace blobstore::internal
