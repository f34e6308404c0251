// Fuzzes the readers of indexes, parts and ways of releases, and of encoded contents. The corpora of all are tried with
// each reader.
#include <algorithm>
#include <string>

#include "codec/decoder.h"
#include "format/format_error.h"
#include "input.h"
#include "releases/index.h"
#include "releases/parts.h"
#include "releases/ways.h"

namespace {

using namespace blobstore::internal; // NOLINT: all that is tested is in there

void use_index(const std::string& bytes) {
  const ReleaseIndex index = read_index(bytes, "fuzz");
  for (const ReleaseFile& file : index.files) {
    must(is_sha256(file.object.sha256) && !file.name.empty() && file.name.front() != '/');
    must(("/" + file.name + "/").find("/../") == std::string::npos); // inside of the release
  }
  is_older(index.executorch, "1.5");
}

/// A release with a few files of one size.
ReleaseIndex release_of(size_t files, uint64_t size) {
  ReleaseIndex index;
  for (size_t i = 0; i < files; ++i) {
    index.files.push_back({"", "data", {std::to_string(i), size}});
  }
  return index;
}

void use_parts(const std::string& bytes, size_t files) {
  constexpr uint64_t kSize = uint64_t{1} << 20;
  const ReleaseParts parts = read_parts(bytes, release_of(files, kSize), "fuzz");
  for (const std::vector<ReleasePart>& listed : parts.files) {
    uint64_t end = 0;
    for (const ReleasePart& part : listed) {
      // inside of the file, and over no other part
      must(part.offset >= end && part.size != 0 && part.size <= kSize && part.offset <= kSize - part.size);
      must(part.content < parts.contents.size() && parts.contents[part.content].size == part.size);
      end = part.offset + part.size;
    }
  }
}

void use_ways(const std::string& bytes, size_t contents) {
  ReleaseParts parts;
  for (size_t i = 0; i < contents; ++i) {
    parts.contents.push_back({std::to_string(i), 1 + i});
  }
  const std::string before = R"("index":")"; // that of any release is taken
  const size_t at = bytes.find(before);
  const std::string index = at == std::string::npos ? "" : bytes.substr(at + before.size(), 64);
  const ReleaseWays found = read_ways(bytes, index, parts, "fuzz");
  for (const std::vector<ReleaseWay>& ways : found.ways) {
    for (const ReleaseWay& way : ways) {
      const uint64_t size = found.objects.at(way.object).size;
      must(way.stored <= size && way.at <= size - way.stored); // bytes of the object
      must(!way.base || *way.base < found.contents.size());
    }
  }
  must(cheapest(found.ways, std::vector<bool>(found.contents.size())).size() == found.contents.size());
}

void use_encoded(const std::string& bytes) {
  constexpr const char* kEncodings[] = {
      "raw", "planes:1", "planes:4", "near:u1:0", "near:f2:2", "near:f4:4", "near:u8:2", "near:f8:0"};
  constexpr uint64_t kSize = 3001;
  const std::string stored = bytes.substr(std::min<size_t>(bytes.size(), 1));
  uint64_t size = 0;
  decode(
      *read_encoding(kEncodings[bytes.empty() ? 0 : static_cast<uint8_t>(bytes[0]) % 8]),
      kSize,
      stored.size(),
      [&](uint8_t* out, size_t count, uint64_t at) { stored.copy(reinterpret_cast<char*>(out), count, at); },
      [&](uint8_t* out, size_t count, uint64_t) { std::fill_n(out, count, uint8_t{7}); },
      [&](const uint8_t*, size_t count) { size += count; });
  must(size == kSize);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const auto give = [](const auto& use) { attempt([&] { attempt<FormatError>(use); }); };
  give([&] { use_index(bytes); });
  give([&] { read_mark(bytes, "fuzz"); });
  for (size_t count = 0; count < 6; ++count) {
    give([&] { use_parts(bytes, count); });
    give([&] { use_ways(bytes, count); });
  }
  give([&] { use_encoded(bytes); });
  return 0;
}
