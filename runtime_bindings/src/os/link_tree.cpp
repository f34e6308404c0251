#include "os/link_tree.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <blobstore/error.h>

#include "os/folders.h"
#include "os/output_file.h"
#include "os/paths.h"
#include "os/temporary_files.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

void check(int number, const std::string& path) {
  if (number != 0) {
    throw Error(ErrorKind::FileAccess, path, std::strerror(number), number);
  }
}

/// @param result of a function of the system.
void check_call(int result, const std::string& path) {
  check(result == 0 ? 0 : errno, path);
}

bool is_folder(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

File opened_folder(const std::string& path, int flags = 0) {
  File folder(path, open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECTORY | flags));
  check(folder.is_open() ? 0 : errno, path);
  return folder;
}

/// Make links below a new folder, and bring all folders to the disk.
void make_links(const std::string& root, const std::vector<std::pair<std::string, std::string>>& links) {
  check_call(mkdir(root.c_str(), 0777), root);
  std::vector<std::string> folders = {root};
  for (const auto& [name, target] : links) {
    const std::string path = format("{}/{}", root, name);
    for (size_t end = name.find('/'); end != std::string::npos; end = name.find('/', end + 1)) {
      const std::string folder = format("{}/{}", root, name.substr(0, end));
      if (!is_folder(folder)) {
        check_call(mkdir(folder.c_str(), 0777), folder);
        folders.push_back(folder);
      }
    }
    check_call(symlink(target.c_str(), path.c_str()), path);
  }
  for (const std::string& folder : folders) {
    check(sync_folder(folder), folder);
  }
}

} // namespace

File lock_folder(const std::string& path) {
  File folder = opened_folder(path);
  try {
    folder.lock_exclusive();
  } catch (const Error&) { // this file system has no locks
  }
  return folder;
}

std::optional<File> try_lock_folder(const std::string& path) {
  File folder = opened_folder(path);
  if (flock(folder.descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return std::nullopt;
  }
  return folder;
}

File share_folder(const std::string& path) {
  File folder = opened_folder(path, O_NOFOLLOW);
  try {
    folder.lock_shared();
  } catch (const Error&) { // this file system has no locks
  }
  return folder;
}

void remove_all(const std::string& path) {
  if (is_folder(path)) {
    int failed = 0;
    for (const std::string& name : names_in(path, failed)) {
      remove_all(format("{}/{}", path, name));
    }
    rmdir(path.c_str());
  } else {
    unlink(path.c_str());
  }
}

void remove_temporary(const std::string& folder) {
  int failed = 0;
  for (const std::string& name : names_in(folder, failed)) {
    struct stat status;
    const std::string path = folder + name;
    if (is_temporary(name) && lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
      remove_all(path);
    }
  }
  remove_abandoned(folder);
}

void make_link_tree(
    const std::string& folder, const std::string& name, const std::vector<std::pair<std::string, std::string>>& links) {
  const std::string place = folder + name;
  if (is_folder(place) && std::all_of(links.begin(), links.end(), [&](const auto& link) {
        return link_target(place + "/" + link.first) == link.second;
      })) {
    return;
  }
  const std::string made = temporary_in(folder);
  const std::string old = temporary_in(folder);
  try {
    make_links(made, links);
    if (is_folder(place)) { // a fault left it incomplete
      check_call(std::rename(place.c_str(), old.c_str()), place);
    }
    check_call(std::rename(made.c_str(), place.c_str()), place);
    check(sync_folder(folder), folder);
  } catch (...) {
    if (!is_folder(place)) {
      std::rename(old.c_str(), place.c_str());
    }
    remove_all(made);
    throw;
  }
  remove_all(old);
}

void replace_link(const std::string& folder, const std::string& name, const std::string& target) {
  const std::string place = folder + name;
  const std::string made = temporary_in(folder);
  const std::string back = temporary_in(folder); // made now, because a full disk may have no room for it later
  const std::string old = link_target(place);
  try {
    if (!old.empty()) {
      check_call(symlink(old.c_str(), back.c_str()), place);
    }
    check_call(symlink(target.c_str(), made.c_str()), place);
    check_call(std::rename(made.c_str(), place.c_str()), place);
    if (const int failed = sync_folder(folder); failed != 0) {
      if (std::rename(back.c_str(), place.c_str()) != 0) {
        unlink(place.c_str()); // there was none
      }
      check(failed, place);
    }
  } catch (...) {
    unlink(made.c_str());
    unlink(back.c_str());
    throw;
  }
  unlink(back.c_str());
}

void keep_as(const File& file, const std::string& place) {
  check(sync_file(file.descriptor()), place);
  check_call(std::rename(file.path().c_str(), place.c_str()), place);
  check(sync_folder(folder_of(place)), place);
}

} // namespace blobstore::internal
