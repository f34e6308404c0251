// What Linux says in files that it makes as they are read.
#pragma once

#include <string>

namespace blobstore::internal {

/// The text of a file of the system, such as /proc/self/maps. Empty if it is missing or may not be read.
std::string system_text(const std::string& path);

} // namespace blobstore::internal
