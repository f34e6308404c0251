// Which contents the files of a release consist of. An index names the list by its digest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "releases/index.h"

namespace blobstore::internal {

/// A range of a file with one content.
struct ReleasePart {
  uint64_t offset = 0;
  uint64_t size = 0;
  size_t content = 0; // its number
};

struct ReleaseParts {
  /// For each content of a file, in the order of `ReleaseIndex::distinct`, its parts by ascending offset; what lies
  /// between them is zeros.
  std::vector<std::vector<ReleasePart>> files;
  /// The contents, in the order in which they first occur; their numbers are the positions.
  std::vector<ReleaseObject> contents;
};

/// @param where the file that the bytes are from, for messages.
/// @throws Error InvalidFile: it is malformed, or the list of another release.
ReleaseParts read_parts(const std::string& bytes, const ReleaseIndex& index, const std::string& where);

} // namespace blobstore::internal
