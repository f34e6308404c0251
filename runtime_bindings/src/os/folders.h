// Folders: what is in them, and making them.
#pragma once

#include <string>
#include <vector>

namespace blobstore::internal {

/// The names in a folder, without "." and "..". @param failed set to errno if it cannot be read, otherwise to 0.
std::vector<std::string> names_in(const std::string& folder, int& failed);

/// Whether a path leads to a folder, also through links.
bool leads_to_folder(const std::string& path);

/// Make a folder and those above it. @returns errno, 0 for success, also if it was there.
int make_folder(const std::string& path);

/// A path from the root, with a separator at its end. Links stay as they are.
std::string absolute_folder(const std::string& path);

} // namespace blobstore::internal
