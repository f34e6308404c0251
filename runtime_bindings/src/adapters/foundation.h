// What an adapter is made for: the fingerprint of a foundation, and the named tensors of a file.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/adapters.h>

#include "format/blob_source.h"
#include "format/constants.h"
#include "format/digest.h"
#include "format/ptd_file.h"
#include "logical/index.h"

namespace blobstore::internal {

/// Whether a key stands for a blob, and not for records of blobstore.
bool is_content(std::string_view key);

/// Whether a key counts for the fingerprint of a foundation.
bool counts(std::string_view key);

/// The size of all blobs in bytes, without records.
uint64_t content_size(const BlobSource& source);

/// The tensors whose names and shapes a source records: by the layout of a key, or by the record of a delegate's blob.
std::vector<NamedTensor> named_tensors(const Index& index);

/// The fingerprint of a foundation, made blob by blob, by ascending key. docs/format.md defines it.
class Fingerprint {
 public:
  void add(std::string_view key, const std::optional<Layout>& layout, uint64_t size, const Digest& digest);
  /// 32 hexadecimal digits.
  std::string text() const;

 private:
  std::string rows_;
};

/// Files that are used together. A key may be in several of them.
class Foundation final : public BlobSource {
 public:
  /// @param files must outlive this object.
  /// @throws Error KeyConflict: two files have different contents under a key that counts, or under any key with
  ///   `strict`.
  explicit Foundation(const std::vector<const PtdFile*>& files, bool strict = false);

  const std::string& name() const override { return name_; }
  size_t size() const override { return blobs_.size(); }
  std::string_view key(size_t index) const override { return entry(blobs_[index]).key; }
  std::optional<SourceBlob> find(std::string_view key) const override;

  /// Its `Fingerprint`. A blob is read only if its file records no digest.
  std::string fingerprint() const;

 private:
  struct Place {
    const PtdFile* file = nullptr;
    size_t index = 0;
  };
  static const PtdEntry& entry(const Place& place) { return place.file->entry(place.index); }
  std::vector<const Place*> counted() const;

  std::string name_;
  std::vector<Place> blobs_; // each key once
  TextMap<size_t> index_;
};

/// Open the files of a foundation. @throws Error as `foundation_fingerprint`.
std::vector<std::unique_ptr<PtdFile>> open_foundation(const std::vector<std::string>& paths);

/// Pointers to opened files.
std::vector<const PtdFile*> pointers(const std::vector<std::unique_ptr<PtdFile>>& files);

} // namespace blobstore::internal
