#include "os/scratch_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "os/temporary_files.h"
#include "os/text.h"

namespace blobstore::internal {

ScratchFile::ScratchFile(const std::string& folder) {
#if BLOBSTORE_LINUX && defined(MFD_CLOEXEC) && (!defined(__ANDROID_API__) || __ANDROID_API__ >= 30)
  file_ = File("memory", memfd_create("blobstore", MFD_CLOEXEC));
  if (file_.is_open()) {
    path_ = format("/proc/self/fd/{}", file_.descriptor());
    return;
  }
#endif
  name_ = temporary_in(folder);
  file_ = File(name_, open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file_.is_open()) {
    throw_errno(name_, errno);
  }
  path_ = name_;
}

ScratchFile::~ScratchFile() {
  if (!name_.empty()) {
    unlink(name_.c_str());
  }
}

} // namespace blobstore::internal
