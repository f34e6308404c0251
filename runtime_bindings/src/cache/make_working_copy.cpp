#include <cstring>
#include <deque>

#include <blobstore/cache.h>

#include "cache/working_copy.h"
#include "format/file_kind.h"
#include "format/ptd_bounds.h"
#include "format/ptd_file.h"
#include "format/ptd_writer.h"
#include "os/output_file.h"
#include "os/random.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {

using namespace internal;
namespace {

/// The blobs of several files, where equal keys must have equal contents.
class Merged {
 public:
  Merged() : writer_(/*share=*/false, [this] { check_lengths(); }) {}

  void add(const std::string& path) {
    const PtdFile& file = files_.emplace_back(path);
    for (size_t i = 0; i < file.size(); ++i) {
      add(file, i);
    }
  }
  const PtdWriter& writer() const { return writer_; }

 private:
  struct Known {
    size_t number; // in the writer
    const PtdFile* file;
  };

  void add(const PtdFile& file, size_t index) {
    const PtdEntry& entry = file.entry(index);
    const SourceBlob blob = file.blob(index);
    const auto known = numbers_.find(entry.key);
    if (known != numbers_.end()) {
      check_damage(file, index, digest(blob.data, blob.size));
      check_same(*known->second.file, file, index);
      writer_.align(known->second.number, entry.alignment);
      return;
    }
    writer_.add(entry.key, entry.layout, entry.alignment, blob.data, blob.size);
    check_damage(file, index, writer_.digest_of(numbers_.size()));
    numbers_.emplace(entry.key, Known{numbers_.size(), &file});
  }

  static void check_damage(const PtdFile& file, size_t index, const Digest& found) {
    const std::optional<Digest> recorded = file.recorded_digest(index);
    if (recorded && *recorded != found) {
      throw_error_in(
          ErrorKind::Integrity,
          file.name(),
          "the bytes of '{}' are damaged: expected xxh3-128 {}, found {}",
          file.key(index),
          to_string(*recorded),
          to_string(found));
    }
  }

  static void check_same(const PtdFile& other, const PtdFile& file, size_t index) {
    const std::string_view key = file.key(index);
    const SourceBlob blob = file.blob(index);
    const SourceBlob before = *other.find(key);
    if (*before.layout != *blob.layout) {
      throw_error(
          ErrorKind::KeyConflict,
          "key '{}' is {} in {} but {} in {}",
          key,
          to_string(*before.layout),
          other.name(),
          to_string(*blob.layout),
          file.name());
    }
    if (before.size != blob.size || std::memcmp(before.data, blob.data, blob.size) != 0) {
      throw_error(
          ErrorKind::KeyConflict, "key '{}' has different bytes in {} and in {}", key, other.name(), file.name());
    }
  }

  void check_lengths() const {
    for (const PtdFile& file : files_) {
      file.check_length();
    }
  }

  std::deque<PtdFile> files_; // the writer refers to their memory
  PtdWriter writer_;
  TextMap<Known> numbers_;
};

} // namespace

uint64_t make_working_copy(const std::vector<std::string>& paths, const std::string& target) {
  check_data_output(target, paths);
  check_unread(target);
  Merged merged;
  for (const std::string& path : paths) {
    merged.add(path);
  }
  uint64_t size = 0;
  {
    OutputFile file(target);
    size = merged.writer().write(file, {{kWorkingCopyKey, random_digits(kWorkingCopyDigits)}});
    file.commit();
  } // which unlocks the file
  remove_earlier_state(target);
  return size;
}

} // namespace blobstore
