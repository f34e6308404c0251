// The index of a release and the tables of its files, which blobstore/releases/index/index.py describes. Both come from
// servers and are hostile until they were read here; the two readers refuse the same ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "format/constants.h"

namespace blobstore::internal {

/// Immutable bytes, named by their SHA-256.
struct ReleaseObject {
  std::string sha256;
  uint64_t size = 0;
};

/// One file of a release.
struct ReleaseFile {
  std::string name; // its path below the folder of the release
  std::string kind; // "program", "data" or "other"
  ReleaseObject object;
  std::optional<ReleaseObject> table;
};

/// Small files one behind the other.
struct ReleasePack {
  ReleaseObject object;
  std::vector<std::pair<size_t, uint64_t>> files; // position in the index, and first byte in the pack
};

/// The parts of an index that a device needs.
struct ReleaseIndex {
  std::string name;
  std::string version;
  uint64_t published = 0;
  std::string executorch;
  std::vector<ReleaseFile> files;
  std::vector<ReleasePack> packs;
  bool has_programs = false;

  uint64_t size() const;
};

/// A range of a file with one content.
struct ReleasePart {
  uint64_t offset = 0;
  uint64_t size = 0;
  std::string sha256;
};

/// Places in a list by a text that lives elsewhere.
using Positions = std::map<std::string_view, size_t>;

bool is_sha256(std::string_view text);

/// @param where the file that the bytes are from, for messages.
/// @throws Error InvalidFile: it is malformed, or names something outside the folder of a release.
ReleaseIndex read_index(const std::string& bytes, const std::string& where);

/// The parts of a file by ascending offset; what lies between them is zeros.
/// @throws Error InvalidFile: it is malformed, or the table of another file.
std::vector<ReleasePart> read_table(const std::string& bytes, const ReleaseObject& file, const std::string& where);

/// A table without other forms, as the Python package writes it.
std::string table_text(const ReleaseObject& file, const std::vector<ReleasePart>& parts);

/// The data files in a list of those that the Python package merged on the device. @throws Error InvalidFile.
std::vector<ReleaseObject> read_merged(const std::string& bytes, const std::string& where);

/// Whether a version of ExecuTorch, such as "1.5", comes before another one; empty if one of them is no version.
std::optional<bool> is_older(std::string_view version, std::string_view other);

} // namespace blobstore::internal
