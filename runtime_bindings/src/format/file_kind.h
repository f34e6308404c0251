// Telling files apart by their first bytes, and protecting those that must not be replaced.
#pragma once

#include <string>
#include <vector>

namespace blobstore::internal {

enum class FileKind { Program, Data, Safetensors, Html, Unknown };

/// The kind that a file claims to be; a reader checks the rest.
/// @throws Error FileAccess: it cannot be read, or is not a regular file. InvalidFile: it is empty.
FileKind file_kind(const std::string& path);

/// Check that a path may be written to as a .ptd: if a file is there, it is an empty one or a .ptd.
///
/// @param inputs files that the output is made of.
/// @throws Error OutputPath: the path leads to an input, a file of another kind, or a data file that was written
///   together with programs. FileAccess: it is not a regular file, or cannot be read.
void check_data_output(const std::string& path, const std::vector<std::string>& inputs);

} // namespace blobstore::internal
