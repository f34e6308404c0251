// Loaded before the C library, this makes a process believe that its pages have BLOBSTORE_TEST_PAGE_KIB: all maps begin
// and end at such pages, and a map of a file ends in zeros where its last page does.

#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

size_t page() {
  static const size_t size = [] {
    const char* kib = std::getenv("BLOBSTORE_TEST_PAGE_KIB");
    return kib != nullptr ? std::strtoul(kib, nullptr, 10) << 10 : 4096;
  }();
  return size;
}

uintptr_t up(uintptr_t value, uintptr_t to) {
  return (value + to - 1) / to * to;
}

void* map(uintptr_t at, size_t size, int protection, int flags, int file, off_t offset) {
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, size, protection, flags, file, offset));
}

} // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED long sysconf(int name) noexcept {
  static const auto real = reinterpret_cast<long (*)(int)>(dlsym(RTLD_NEXT, "sysconf"));
  return name == _SC_PAGESIZE ? static_cast<long>(page()) : real(name);
}

EXPORTED int getpagesize() noexcept {
  return static_cast<int>(page());
}

EXPORTED void* mmap(void* hint, size_t size, int protection, int flags, int file, off_t offset) noexcept {
  auto at = reinterpret_cast<uintptr_t>(hint);
  const bool fixed = (flags & MAP_FIXED) != 0;
  if (size == 0 || offset % static_cast<off_t>(page()) != 0 || (fixed && at % page() != 0)) {
    errno = EINVAL;
    return MAP_FAILED;
  }
  size = up(size, page());
  if (!fixed) { // room for a whole page at each end
    void* room = map(0, size + page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
      return MAP_FAILED;
    }
    const auto begin = reinterpret_cast<uintptr_t>(room);
    at = up(begin, page());
    if (at != begin) {
      munmap(room, at - begin);
    }
    if (at + size != begin + size + page()) {
      munmap(reinterpret_cast<void*>(at + size), begin + page() - at);
    }
  }
  if ((flags & MAP_ANONYMOUS) != 0) {
    return map(at, size, protection, flags | MAP_FIXED, file, offset);
  }
  struct stat status;
  if (fstat(file, &status) != 0) {
    return MAP_FAILED;
  }
  const size_t there = offset < status.st_size ? up(static_cast<size_t>(status.st_size - offset), 4096) : 0;
  const size_t of_file = there < size ? there : size;
  // each page is replaced by one call, as Linux does it: another thread may read the old bytes
  if (of_file != 0 && map(at, of_file, protection, flags | MAP_FIXED, file, offset) == MAP_FAILED) {
    return MAP_FAILED;
  }
  if (of_file != size) {
    const int zeros = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (map(at + of_file, size - of_file, protection, zeros, -1, 0) == MAP_FAILED) {
      return MAP_FAILED;
    }
  }
  return reinterpret_cast<void*>(at);
}

EXPORTED void* mmap64(void* hint, size_t size, int protection, int flags, int file, off_t offset) noexcept {
  return mmap(hint, size, protection, flags, file, offset);
}
