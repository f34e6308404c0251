// Fuzzes the readers of indexes and tables of releases. The corpora of both are tried with either reader.
#include <cstdlib>
#include <string>

#include <blobstore/error.h>

#include "releases/index.h"

namespace {

using namespace blobstore::internal; // NOLINT: all that is tested is in there

void use_index(const std::string& bytes) {
  const ReleaseIndex index = read_index(bytes, "fuzz");
  for (const ReleaseFile& file : index.files) {
    if (!is_sha256(file.object.sha256) || file.name.empty() || file.name.front() == '/' ||
        ("/" + file.name + "/").find("/../") != std::string::npos) {
      std::abort(); // a file outside of the release
    }
  }
  for (const ReleasePack& pack : index.packs) {
    for (const auto& [position, at] : pack.files) {
      if (position >= index.files.size() || index.files[position].object.size > pack.object.size ||
          at > pack.object.size - index.files[position].object.size) {
        std::abort(); // a file outside of its pack
      }
    }
  }
  is_older(index.executorch, "1.5");
}

/// The file that a table says it is of, if it says so where the Python package does.
ReleaseObject file_of(const std::string& bytes) {
  ReleaseObject file{std::string(64, '0'), uint64_t{1} << 20};
  const std::string before = R"("sha256":")";
  const size_t at = bytes.find(before);
  if (at != std::string::npos && bytes.size() - at > before.size() + 64) {
    file.sha256 = bytes.substr(at + before.size(), 64);
  }
  const size_t size = bytes.find(R"("size":)");
  if (size != std::string::npos) {
    file.size = std::strtoull(bytes.c_str() + size + 7, nullptr, 10);
  }
  return file;
}

void use_table(const std::string& bytes) {
  const ReleaseObject file = file_of(bytes);
  const std::vector<ReleasePart> parts = read_table(bytes, file, "fuzz");
  uint64_t end = 0;
  for (const ReleasePart& part : parts) {
    if (part.offset < end || part.size == 0 || part.offset > file.size || part.size > file.size - part.offset) {
      std::abort(); // a part outside of the file, or over another one
    }
    end = part.offset + part.size;
  }
  const std::string text = table_text(file, parts);
  if (read_table(text, file, "again").size() != parts.size()) {
    std::abort(); // what is written is not what is read
  }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  try {
    use_index(bytes);
  } catch (const blobstore::Error&) {
  }
  try {
    use_table(bytes);
  } catch (const blobstore::Error&) {
  }
  try {
    read_merged(bytes, "fuzz");
  } catch (const blobstore::Error&) {
  }
  return 0;
}
