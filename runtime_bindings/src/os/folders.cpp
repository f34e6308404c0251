#include "os/folders.h"

#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string_view>

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

namespace blobstore::internal {

std::vector<std::string> names_in(const std::string& folder, int& failed) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), closedir);
  failed = entries == nullptr ? errno : 0;
  while (entries != nullptr) {
    const dirent* entry = readdir(entries.get());
    if (entry == nullptr) {
      break;
    }
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") {
      names.emplace_back(name);
    }
  }
  return names;
}

bool leads_to_folder(const std::string& path) {
  struct stat status;
  return stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

int make_folder(const std::string& path) {
  for (size_t end = path.find('/', 1); true; end = path.find('/', end + 1)) {
    if (mkdir(path.substr(0, end).c_str(), 0777) != 0 && errno != EEXIST) {
      const int number = errno;
      if (!leads_to_folder(path.substr(0, end))) {
        return number; // a folder that is there may also be reported as read-only
      }
    }
    if (end == std::string::npos || end + 1 == path.size()) {
      return 0;
    }
  }
}

std::string absolute_folder(const std::string& path) {
  std::string whole = path;
  if (path.empty() || path[0] != '/') {
    const std::unique_ptr<char, void (*)(void*)> here(getcwd(nullptr, 0), std::free);
    whole = (here != nullptr ? std::string(here.get()) : std::string()) + "/" + path;
  }
  return whole.back() == '/' ? whole : whole + "/";
}

} // namespace blobstore::internal
