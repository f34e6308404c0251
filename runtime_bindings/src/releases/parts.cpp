#include "releases/parts.h"

#include <unordered_map>

#include "format/constants.h"
#include "releases/fields.h"

namespace blobstore::internal {
namespace {

void check_hole(uint64_t start, uint64_t stop) {
  if (stop - start > kHoleLimit) {
    throw_format_error(
        "no part covers the {} bytes at {}; at most {} may lie between parts", stop - start, start, kHoleLimit);
  }
}

void check_file(const ReleaseObject& file, const std::vector<ReleasePart>& parts) {
  uint64_t end = 0;
  for (const ReleasePart& part : parts) {
    if (part.offset < end || part.offset + part.size > file.size) {
      throw_format_error(
          "the part of {} bytes at {} of {} overlaps another one, or the end of the file at {}",
          part.size,
          part.offset,
          file.sha256,
          file.size);
    }
    check_hole(end, part.offset);
    end = part.offset + part.size;
  }
  check_hole(end, file.size);
}

ReleaseParts parse_parts(const std::string& bytes, const ReleaseIndex& index) {
  ReleaseParts found;
  std::unordered_map<std::string, size_t> numbers;
  Fields fields(bytes);
  const auto read_part = [&] {
    ReleasePart part;
    std::string sha256;
    fields.tuple("a part", 3, kAnyNumber, [&](size_t position) {
      if (position == 0) {
        part.offset = fields.number("an offset");
      } else if (position == 1) {
        part.size = fields.number("the size of a part", 1);
      } else if (position == 2) {
        sha256 = fields.text("a SHA-256", is_sha256);
      } else {
        fields.json.skip();
      }
    });
    const auto [place, is_new] = numbers.emplace(std::move(sha256), found.contents.size());
    part.content = place->second;
    if (is_new) {
      found.contents.push_back({place->first, part.size});
    } else if (found.contents[part.content].size != part.size) {
      throw_format_error(
          "the content {} occurs with {} and {} bytes", place->first, found.contents[part.content].size, part.size);
    }
    return part;
  };
  fields.object("the list", "format files ", [&](const std::string& key) {
    if (key == "format") {
      fields.format_is("blobstore.parts.1");
    } else if (key == "files") {
      fields.array("the list of files", kMostFiles, [&](size_t) {
        std::vector<ReleasePart>& parts = found.files.emplace_back();
        fields.array("the parts of a file", kAnyNumber, [&](size_t) { parts.push_back(read_part()); });
      });
    } else {
      return false;
    }
    return true;
  });
  fields.json.end();
  const std::vector<const ReleaseFile*> files = index.distinct();
  if (found.files.size() != files.size()) {
    throw_format_error("expected the parts of {} different files, found those of {}", files.size(), found.files.size());
  }
  for (size_t i = 0; i < files.size(); ++i) {
    check_file(files[i]->object, found.files[i]);
  }
  return found;
}

} // namespace

ReleaseParts read_parts(const std::string& bytes, const ReleaseIndex& index, const std::string& where) {
  return in_file(bytes, where, "a list of the parts", [&] { return parse_parts(bytes, index); });
}

} // namespace blobstore::internal
