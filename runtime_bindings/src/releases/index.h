// The index of a release. It comes from servers and is hostile until it was read here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "releases/object.h"

namespace blobstore::internal {

/// One file of a release.
struct ReleaseFile {
  std::string name; // its path below the folder of the release
  std::string kind; // "program", "data", "adapter" or "other"
  ReleaseObject object;
  std::vector<std::string> data; // of a program: the names of the data files that it takes

  /// Whether a cache can have it.
  bool is_data() const;
};

/// Which release an index is of, and when that was published.
struct ReleaseMark {
  std::string name;
  std::string version;
  uint64_t published = 0;
};

/// The parts of an index that a device needs.
struct ReleaseIndex : ReleaseMark {
  std::string executorch;
  std::vector<ReleaseFile> files;
  ReleaseObject parts; // the list of the parts of the files
  bool plain = false; // every file is also an object of its own

  uint64_t size() const;
  /// @param has the version of ExecuTorch on the device; if it is empty, nothing is checked.
  /// @param where the release is, for messages.
  /// @throws Error Release: the programs need a newer one.
  void check_executorch(const std::string& has, const std::string& where) const;
  /// The file of a name; null if there is none. Valid as long as this object.
  const ReleaseFile* find(std::string_view name_of_file) const;
  /// The files with different contents, each the first of its content.
  std::vector<const ReleaseFile*> distinct() const;
};

/// Places in a list by a text that lives elsewhere.
using Positions = std::map<std::string_view, size_t>;

/// @param where the file that the bytes are from, for messages.
/// @throws Error InvalidFile: it is malformed, or names something outside the folder of a release.
ReleaseIndex read_index(const std::string& bytes, const std::string& where);

/// The same for an index of any format.
ReleaseMark read_mark(const std::string& bytes, const std::string& where);

/// Whether a version of ExecuTorch, such as "1.5", comes before another one; empty if one of them is no version.
std::optional<bool> is_older(std::string_view version, std::string_view other);

} // namespace blobstore::internal
