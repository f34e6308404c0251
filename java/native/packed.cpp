// PackedStore in Java.
#include <blobstore/packed.h>

#include "crossing.h"

namespace blobstore::java {

template <>
struct Mirror<PackedFile> {
  static constexpr const char* name = "PackedFile";
  static auto fields(const PackedFile& file) {
    return std::make_tuple(file.path, file.size, file.entries, file.mapped, file.used, file.in_use, file.problem);
  }
};

template <>
struct Mirror<PackedStats> {
  static constexpr const char* name = "PackedStats";
  static auto fields(const PackedStats& stats) {
    std::vector<std::string> why;
    std::vector<uint64_t> often;
    for (const auto& [reason, count] : stats.reasons) {
      why.push_back(reason);
      often.push_back(count);
    }
    const std::vector<uint64_t> numbers = {
        stats.hits,
        stats.builds,
        stats.fallbacks,
        stats.written,
        stats.repacked,
        stats.dropped,
        stats.verified_bytes,
        stats.mapped_bytes};
    return std::make_tuple(numbers, why, often);
  }
};

namespace {

std::shared_ptr<PackedStore> open(const Path& folder, uint64_t limit, bool verify, uint64_t read_ahead) {
  PackedOptions options;
  options.limit = limit;
  options.verify = verify;
  options.read_ahead = read_ahead;
  return PackedStore::open(folder.text, options);
}

} // namespace

std::vector<Row> packed_rows() {
  return {
      row<&open>("openPacked"),
      row<&PackedStore::stats>("packedStats"),
      row<&PackedStore::list>("packedList"),
      row<&PackedStore::verify>("packedVerify"),
      row<&PackedStore::gc>("packedGc")};
}

} // namespace blobstore::java
