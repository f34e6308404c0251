#include "os/paths.h"

#include <climits>
#include <cstdlib>
#include <memory>

#include <sys/stat.h>
#include <unistd.h>

namespace blobstore::internal {
namespace {

constexpr int kMostLinks = 40; // as Linux follows

} // namespace

std::string link_target(const std::string& path) {
  std::string target(PATH_MAX, '\0');
  const ssize_t size = readlink(path.c_str(), target.data(), target.size());
  target.resize(size > 0 ? static_cast<size_t>(size) : 0);
  return target;
}

std::string real_path(const std::string& path) {
  std::string at = path;
  for (int links = 0; links < kMostLinks; ++links) {
    const size_t end = at.rfind('/');
    const std::string folder = end == std::string::npos ? "." : at.substr(0, end + 1);
    const std::string target = link_target(at);
    if (target.empty()) {
      const std::unique_ptr<char, void (*)(void*)> real(realpath(folder.c_str(), nullptr), std::free);
      if (real == nullptr) {
        return path;
      }
      const std::string found = real.get();
      return found + (found.back() == '/' ? "" : "/") + (end == std::string::npos ? at : at.substr(end + 1));
    }
    at = target[0] == '/' || end == std::string::npos ? target : folder + target;
  }
  return path;
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat one;
  struct stat other;
  if (stat(a.c_str(), &one) == 0 && stat(b.c_str(), &other) == 0) {
    return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
  }
  return real_path(a) == real_path(b);
}

} // namespace blobstore::internal
