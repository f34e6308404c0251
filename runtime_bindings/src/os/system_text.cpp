#include "os/system_text.h"

#include <cerrno>

#include <fcntl.h>
#include <unistd.h>

#include "os/file.h"

namespace blobstore::internal {

std::string system_text(const std::string& path) {
  const File file(path, open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string text;
  while (file.is_open()) {
    char part[16384];
    const ssize_t count = read(file.descriptor(), part, sizeof part);
    if (count > 0) {
      text.append(part, static_cast<size_t>(count));
    } else if (count == 0 || errno != EINTR) {
      break;
    }
  }
  return text;
}

} // namespace blobstore::internal
