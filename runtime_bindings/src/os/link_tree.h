// Folders of links that appear whole, and locks on folders.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "os/file.h"

namespace blobstore::internal {

/// Wait for a lock on a folder against all processes, including those of the Python package. The lock ends with the
/// result. On a file system without locks, nothing is locked. @throws Error FileAccess: the folder is missing.
File lock_folder(const std::string& path);

/// The same without waiting; empty if another process has a lock on the folder. @throws Error FileAccess.
std::optional<File> try_lock_folder(const std::string& path);

/// Wait for a lock that others may have, too, but none of those above. The path must not end with a separator.
/// @throws Error FileAccess: also if the path is a link.
File share_folder(const std::string& path);

/// Remove a file, a link, or a folder with all that is in it. Links are not followed, and failures are ignored.
void remove_all(const std::string& path);

/// Remove temporary files, links and folders from a folder that this process has locked, so that no process uses them.
void remove_temporary(const std::string& folder);

/// Make a folder of links, or replace one. It is on the disk when this returns.
///
/// @param folder where it goes; ends with a separator.
/// @param links names, which may lead into folders below it, and where each link leads.
/// @throws Error FileAccess: it was not made; for example, the file system takes two of the names for one.
void make_link_tree(
    const std::string& folder, const std::string& name, const std::vector<std::pair<std::string, std::string>>& links);

/// Make a link, or replace one, in a moment. It is on the disk when this returns.
/// @throws Error FileAccess: the old link, if any, is in its place.
void replace_link(const std::string& folder, const std::string& name, const std::string& target);

/// Bring a file to the disk, and give it another name, where it replaces a file. @throws Error FileAccess.
void keep_as(const File& file, const std::string& place);

} // namespace blobstore::internal
