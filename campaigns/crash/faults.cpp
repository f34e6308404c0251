// Preloaded into a process (LD_PRELOAD), this library makes one of its system calls fail, or kills the process there.
//
// Only calls on files below one folder count, so that the interpreter's own files are left alone. The calls are recorded,
// so that a campaign can first count them and then go through them.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

enum Action { kFail = 0, kKill = 1, kShort = 2, kFull = 3 };

constexpr int kDescriptors = 4096;
constexpr int kNames = 65536;

char folder[PATH_MAX];
size_t folder_size = 0;
std::atomic<bool> watched[kDescriptors];
std::atomic<bool> counting{false};
std::atomic<int> calls{0};
const char* names[kNames];
int wanted = 0; // the number of the call, counted from 1; 0 stands for none
int action = kFail;
int failure = EIO;

bool is_watched(const char* path) {
  if (path == nullptr || folder_size == 0) {
    return false;
  }
  int descriptor = 0;
  if (std::sscanf(path, "/proc/self/fd/%d", &descriptor) == 1) {
    return descriptor >= 0 && descriptor < kDescriptors && watched[descriptor];
  }
  return std::strncmp(path, folder, folder_size) == 0;
}

bool is_watched(int descriptor) {
  return descriptor >= 0 && descriptor < kDescriptors && watched[descriptor];
}

// `at`: the folder of a path that is relative.
bool is_watched(int at, const char* path) {
  return is_watched(path) || (path != nullptr && path[0] != '/' && is_watched(at));
}

// A full disk may have no room for a new name; a name that replaces another needs no room.
bool is_new(const char* path) {
  return access(path, F_OK) != 0;
}

bool is_new(int at, const char* path) {
  return faccessat(at, path, F_OK, 0) != 0;
}

enum class Verdict { Go, Fail, Short };

// `takes_space`: a full disk refuses it.
Verdict decide(const char* name, bool takes_space) {
  if (!counting) {
    return Verdict::Go;
  }
  const int number = ++calls;
  if (number <= kNames) {
    names[number - 1] = name;
  }
  const bool full = action == kFull && wanted != 0 && number >= wanted && takes_space;
  if (number != wanted && !full) {
    return Verdict::Go;
  }
  switch (action) {
    case kKill:
      kill(getpid(), SIGKILL);
      break;
    case kShort:
      return Verdict::Short;
    case kFull:
      if (!full) {
        return Verdict::Go;
      }
      errno = ENOSPC;
      return Verdict::Fail;
    default:
      break;
  }
  errno = failure;
  return Verdict::Fail;
}

template <typename Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

int remember(int descriptor, bool is) {
  if (descriptor >= 0 && descriptor < kDescriptors) {
    watched[descriptor] = is;
  }
  return descriptor;
}

} // namespace

#define NEXT(name) static const auto real = next(&::name, #name)
#define REFUSE(condition, name, takes_space, failed)                            \
  if ((condition) && decide(#name, takes_space) == Verdict::Fail) {             \
    return failed;                                                              \
  }

extern "C" {

void faults_watch(const char* path) {
  std::strncpy(folder, path, sizeof folder - 1);
  folder_size = std::strlen(folder);
}

void faults_arm(int number, int what, int error) {
  wanted = number;
  action = what;
  failure = error;
  calls = 0;
  counting = true;
}

/// @returns the number of calls.
int faults_disarm() {
  counting = false;
  return calls;
}

const char* faults_name(int number) {
  return number >= 1 && number <= kNames && names[number - 1] != nullptr ? names[number - 1] : "";
}

#define OPEN(name)                                                              \
  int name(const char* path, int flags, ...) {                                  \
    NEXT(name);                                                                 \
    va_list arguments;                                                          \
    va_start(arguments, flags);                                                 \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments);                                                          \
    const bool is = is_watched(path);                                           \
    REFUSE(is, name, (flags & O_CREAT) != 0, -1)                                \
    return remember(real(path, flags, mode), is);                               \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                            \
  int name(int at, const char* path, int flags, ...) {                          \
    NEXT(name);                                                                 \
    va_list arguments;                                                          \
    va_start(arguments, flags);                                                 \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments);                                                          \
    const bool is = is_watched(at, path);                                       \
    REFUSE(is, name, (flags & O_CREAT) != 0, -1)                                \
    return remember(real(at, path, flags, mode), is);                           \
  }
OPENAT(openat)
OPENAT(openat64)

// As on Linux, the descriptor is closed whatever is returned.
int close(int descriptor) {
  NEXT(close);
  const bool is = is_watched(descriptor);
  remember(descriptor, false);
  if (is && decide("close", false) == Verdict::Fail) {
    const int number = errno;
    real(descriptor);
    errno = number;
    return -1;
  }
  return real(descriptor);
}

#define TRANSFER(result, name, type, parameters, arguments, takes_space)        \
  result name parameters {                                                      \
    NEXT(name);                                                                 \
    if (is_watched(descriptor)) {                                               \
      const Verdict verdict = decide(#name, takes_space);                       \
      if (verdict == Verdict::Fail) {                                           \
        return -1;                                                              \
      }                                                                         \
      if (verdict == Verdict::Short && size > 1) {                              \
        size /= 2;                                                              \
      }                                                                         \
    }                                                                           \
    return real arguments;                                                      \
  }
TRANSFER(ssize_t, read, , (int descriptor, void* data, size_t size), (descriptor, data, size), false)
TRANSFER(ssize_t, write, , (int descriptor, const void* data, size_t size), (descriptor, data, size), true)
TRANSFER(ssize_t, pread, , (int descriptor, void* data, size_t size, off_t at), (descriptor, data, size, at), false)
TRANSFER(ssize_t, pread64, , (int descriptor, void* data, size_t size, off64_t at), (descriptor, data, size, at), false)
TRANSFER(ssize_t, pwrite, , (int descriptor, const void* data, size_t size, off_t at), (descriptor, data, size, at), true)
TRANSFER(ssize_t, pwrite64, , (int descriptor, const void* data, size_t size, off64_t at), (descriptor, data, size, at), true)

#define BY_DESCRIPTOR(name, parameters, arguments, takes_space)                 \
  int name parameters {                                                         \
    NEXT(name);                                                                 \
    REFUSE(is_watched(descriptor), name, takes_space, -1)                       \
    return real arguments;                                                      \
  }
BY_DESCRIPTOR(fsync, (int descriptor), (descriptor), true)
BY_DESCRIPTOR(fdatasync, (int descriptor), (descriptor), true)
BY_DESCRIPTOR(ftruncate, (int descriptor, off_t size), (descriptor, size), true)
BY_DESCRIPTOR(ftruncate64, (int descriptor, off64_t size), (descriptor, size), true)
BY_DESCRIPTOR(fallocate, (int descriptor, int mode, off_t from, off_t size), (descriptor, mode, from, size), true)
BY_DESCRIPTOR(fallocate64, (int descriptor, int mode, off64_t from, off64_t size), (descriptor, mode, from, size), true)
BY_DESCRIPTOR(fchmod, (int descriptor, mode_t mode) noexcept, (descriptor, mode), false)
BY_DESCRIPTOR(fstat, (int descriptor, struct stat* status) noexcept, (descriptor, status), false)
BY_DESCRIPTOR(fstat64, (int descriptor, struct stat64* status) noexcept, (descriptor, status), false)

// Releasing a lock cannot fail, but it can be the last thing that a process does.
int flock(int descriptor, int how) noexcept {
  NEXT(flock);
  const bool back = (how & LOCK_UN) != 0;
  REFUSE(is_watched(descriptor) && (!back || action == kKill), flock, false, -1)
  return real(descriptor, how);
}

// These return the number of the error instead of setting errno.
#define POSIX_FALLOCATE(name, offset_type)                                      \
  int name(int descriptor, offset_type from, offset_type size) {                \
    NEXT(name);                                                                 \
    REFUSE(is_watched(descriptor), name, true, errno)                           \
    return real(descriptor, from, size);                                        \
  }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

#define MMAP(name, offset_type)                                                 \
  void* name(void* at, size_t size, int protection, int flags, int descriptor, offset_type offset) noexcept { \
    NEXT(name);                                                                 \
    REFUSE(is_watched(descriptor), name, false, MAP_FAILED)                     \
    return real(at, size, protection, flags, descriptor, offset);               \
  }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

#define BY_PATH(name, parameters, arguments, condition, takes_space)            \
  int name parameters {                                                         \
    NEXT(name);                                                                 \
    REFUSE(condition, name, takes_space, -1)                                    \
    return real arguments;                                                      \
  }
BY_PATH(rename, (const char* path, const char* to) noexcept, (path, to), is_watched(to), is_new(to))
BY_PATH(
    renameat, (int a, const char* path, int b, const char* to) noexcept, (a, path, b, to), is_watched(b, to),
    is_new(b, to))
BY_PATH(
    renameat2, (int a, const char* path, int b, const char* to, unsigned flags) noexcept, (a, path, b, to, flags),
    is_watched(b, to), is_new(b, to))
BY_PATH(link, (const char* path, const char* to) noexcept, (path, to), is_watched(to), true)
BY_PATH(
    linkat, (int a, const char* path, int b, const char* to, int flags) noexcept, (a, path, b, to, flags),
    is_watched(to), true)
BY_PATH(symlink, (const char* path, const char* to) noexcept, (path, to), is_watched(to), true)
BY_PATH(unlink, (const char* path) noexcept, (path), is_watched(path), false)
BY_PATH(unlinkat, (int at, const char* path, int flags) noexcept, (at, path, flags), is_watched(at, path), false)
BY_PATH(mkdir, (const char* path, mode_t mode) noexcept, (path, mode), is_watched(path), true)
BY_PATH(mkdirat, (int at, const char* path, mode_t mode) noexcept, (at, path, mode), is_watched(at, path), true)
BY_PATH(rmdir, (const char* path) noexcept, (path), is_watched(path), false)
BY_PATH(chmod, (const char* path, mode_t mode) noexcept, (path, mode), is_watched(path), false)
BY_PATH(stat, (const char* path, struct stat* status) noexcept, (path, status), is_watched(path), false)
BY_PATH(stat64, (const char* path, struct stat64* status) noexcept, (path, status), is_watched(path), false)
BY_PATH(lstat, (const char* path, struct stat* status) noexcept, (path, status), is_watched(path), false)
BY_PATH(lstat64, (const char* path, struct stat64* status) noexcept, (path, status), is_watched(path), false)

int msync(void* at, size_t size, int flags) {
  NEXT(msync);
  REFUSE(folder_size != 0, msync, true, -1)
  return real(at, size, flags);
}

} // extern "C"
