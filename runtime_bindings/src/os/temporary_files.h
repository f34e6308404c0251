// Temporary files beside the files that they will replace: their names, their locks, and what killed processes left.
//
// Names and locks are those of blobstore/core/disk, so the Python package and this library clean up after each other: a
// temporary file that no process has locked was left by a killed one.
#pragma once

#include <string>
#include <string_view>

namespace blobstore::internal {

/// A new name in a folder, which ends with a separator.
std::string temporary_in(const std::string& folder);

/// Whether a file name is such a name.
bool is_temporary(std::string_view name);

/// The result of an attempt to lock an open file.
enum class Locked { Yes, ByAnother, NotPossible };

/// Lock an open file, without waiting. The system releases the lock when the last descriptor of this open file is
/// closed.
Locked lock_file(int descriptor, bool shared);

/// Remove the temporary files that killed processes of this user left in a folder. Failures are ignored.
///
/// Only the Python package writes groups of files. If it was killed between two renames, the folder has a journal, with
/// which its next writer finishes the group. Until then all temporary files stay, because the group needs them. A file
/// of the group that is replaced meanwhile is not replaced again. Scratch folders stay, too.
void remove_abandoned(const std::string& folder);

} // namespace blobstore::internal
