#include "os/temporary_files.h"

#include <cerrno>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/file.h"
#include "os/folders.h"
#include "os/random.h"
#include "os/text.h"
#include "os/uninterrupted.h"

namespace blobstore::internal {
namespace {

constexpr std::string_view kPrefix = ".blobstore-";
constexpr std::string_view kTemporary = ".tmp";
constexpr std::string_view kJournal = ".journal";
constexpr size_t kDigits = 24;
constexpr std::string_view kHexadecimal = "0123456789abcdef";

bool has_form(std::string_view name, std::string_view ending) {
  return name.size() == kPrefix.size() + kDigits + ending.size() && name.substr(0, kPrefix.size()) == kPrefix &&
      name.substr(kPrefix.size(), kDigits).find_first_not_of(kHexadecimal) == std::string_view::npos &&
      name.substr(kPrefix.size() + kDigits) == ending;
}

/// Whether the path is a regular file of this user, and not a link to one.
bool is_own_file(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid();
}

void remove_if_abandoned(const std::string& path) {
  if (!is_own_file(path)) {
    return;
  }
  const File file(path, open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW));
  if (file.descriptor() >= 0 && lock_file(file.descriptor(), /*shared=*/false) == Locked::Yes) {
    unlink(path.c_str());
  }
}

} // namespace

std::string temporary_in(const std::string& folder) {
  return format("{}{}{}{}", folder, kPrefix, random_digits(kDigits), kTemporary);
}

bool is_temporary(std::string_view name) {
  return has_form(name, kTemporary);
}

Locked lock_file(int descriptor, bool shared) {
  if (uninterrupted([&] { return flock(descriptor, (shared ? LOCK_SH : LOCK_EX) | LOCK_NB); }) == 0) {
    return Locked::Yes;
  }
  return errno == EWOULDBLOCK ? Locked::ByAnother : Locked::NotPossible;
}

void remove_abandoned(const std::string& folder) {
  int failed = 0;
  std::vector<std::string> temporary;
  for (const std::string& name : names_in(folder, failed)) {
    const std::string path = folder + name;
    if (has_form(name, kJournal) && is_own_file(path)) {
      return;
    }
    if (is_temporary(name)) {
      temporary.push_back(path);
    }
  }
  for (const std::string& path : temporary) {
    remove_if_abandoned(path);
  }
}

} // namespace blobstore::internal
