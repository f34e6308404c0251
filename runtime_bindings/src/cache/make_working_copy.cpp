#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include <blobstore/cache.h>

#include "cache/opened_files.h"
#include "cache/working_copy.h"
#include "format/constants.h"
#include "format/file_kind.h"
#include "format/format_error.h"
#include "format/json.h"
#include "format/ptd_file.h"
#include "format/ptd_writer.h"
#include "os/output_file.h"
#include "os/random.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// The entry of the metadata that says which keys came from which file: for each file a list, of the first position of
/// keys and the one behind the last, and so on.
constexpr char kCopiedFilesKey[] = "blobstore.working_copy.files";

/// How many positions the lists may have together, for each key of the file: a short text could stand for many.
constexpr size_t kMostForKey = 16;

/// Positions, as the ends of ranges of them: first, behind the last, and so on.
std::string ranges_of(const std::vector<size_t>& positions) {
  std::string text;
  for (size_t i = 0; i < positions.size();) {
    const size_t first = positions[i];
    size_t end = first;
    for (; i < positions.size() && positions[i] == end; ++i) {
      ++end;
    }
    text += format("{}{},{}", text.empty() ? "" : ",", first, end);
  }
  return text;
}

} // namespace

std::vector<std::vector<size_t>> files_in(const PtdFile& file) {
  std::vector<std::vector<size_t>> files;
  const auto recorded = file.metadata().find(kCopiedFilesKey);
  if (recorded == file.metadata().end()) {
    files.emplace_back(file.size());
    std::iota(files[0].begin(), files[0].end(), size_t{0});
    return files;
  }
  try {
    JsonReader json(recorded->second, "the list of copied files");
    size_t left = kMostForKey * file.size();
    json.array([&] {
      std::vector<size_t>& positions = files.emplace_back();
      std::optional<uint64_t> first;
      uint64_t least = 0;
      json.array([&] {
        const std::optional<uint64_t> number = json.size();
        if (!number || *number < least || *number > file.size() || (first && *number - *first > left)) {
          throw FormatError("the list of copied files has a position that is not possible");
        }
        least = *number;
        if (!first) {
          first = number;
          return;
        }
        left -= *number - *first;
        for (; *first < *number; ++*first) {
          positions.push_back(*first);
        }
        first.reset();
      });
      if (first) {
        throw FormatError("the list of copied files has a range without an end");
      }
    });
    json.end();
  } catch (const FormatError& error) {
    throw_error_in(ErrorKind::InvalidFile, file.name(), "{}", error.what());
  }
  return files;
}

} // namespace blobstore::internal

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
    for (std::vector<size_t>& positions : files_in(file)) {
      for (size_t& position : positions) {
        position = numbers_.at(file.entry(position).key).number;
      }
      std::sort(positions.begin(), positions.end());
      copied_ += format("{}[{}]", copied_.empty() ? "" : ",", ranges_of(positions));
      count_ += positions.size();
    }
    if (const auto scale = file.metadata().find(kScaleKey); scale != file.metadata().end()) {
      scales_.insert(scale->second);
    }
  }
  const PtdWriter& writer() const { return writer_; }
  /// What the copy says of its files, and of what its programs multiply adapters with if they agree on that.
  std::map<std::string, std::string> metadata() const {
    std::map<std::string, std::string> found;
    if (count_ <= kMostForKey * numbers_.size()) {
      found.emplace(kCopiedFilesKey, format("[{}]", copied_));
    }
    if (scales_.size() == 1) {
      found.emplace(kScaleKey, *scales_.begin());
    }
    return found;
  }

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
      check_same(entry.key, *known->second.file, *known->second.file->find(entry.key), file, blob);
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

  void check_lengths() const {
    for (const PtdFile& file : files_) {
      file.check_length();
    }
  }

  std::deque<PtdFile> files_; // the writer refers to their memory
  PtdWriter writer_;
  TextMap<Known> numbers_;
  std::string copied_; // as kCopiedFilesKey
  size_t count_ = 0; // of positions in it
  std::set<std::string> scales_;
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
    std::map<std::string, std::string> metadata = merged.metadata();
    metadata.emplace(kWorkingCopyKey, random_digits(kWorkingCopyDigits));
    size = merged.writer().write(file, metadata);
    file.commit();
  } // which unlocks the file
  remove_earlier_state(target);
  return size;
}

} // namespace blobstore
