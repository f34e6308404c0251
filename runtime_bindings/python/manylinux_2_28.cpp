// What newer compilers and systems take from their libraries and manylinux_2_28 does not have, by its older names. The
// module that `make dist` builds has these definitions for itself (-DBLOBSTORE_MANYLINUX=ON).

#include <pthread.h>

#include <condition_variable>
#include <mutex>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

#if defined(__x86_64__)
#define GLIBC "GLIBC_2.2.5"
constexpr int kStatVersion = 1;
#else
#define GLIBC "GLIBC_2.17"
constexpr int kStatVersion = 0;
#endif

// glibc 2.29: it no longer looks at how errors are reported; the results are the same.
asm(".symver blobstore_old_pow, pow@" GLIBC);
extern "C" double blobstore_old_pow(double base, double exponent);
HIDDEN double blobstore_pow(double base, double exponent) asm("pow");
double blobstore_pow(double base, double exponent) {
  return blobstore_old_pow(base, exponent);
}

// glibc 2.32: whether there is one thread, which lets shared pointers count without atomic operations.
HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// glibc 2.33: they were inline functions before.
asm(".symver __xstat, __xstat@" GLIBC);
asm(".symver __fxstat, __fxstat@" GLIBC);
asm(".symver __lxstat, __lxstat@" GLIBC);
extern "C" int __xstat(int version, const char* path, void* status);
extern "C" int __fxstat(int version, int descriptor, void* status);
extern "C" int __lxstat(int version, const char* path, void* status);

HIDDEN int stat(const char* path, void* status) {
  return __xstat(kStatVersion, path, status);
}
HIDDEN int fstat(int descriptor, void* status) {
  return __fxstat(kStatVersion, descriptor, status);
}
HIDDEN int lstat(const char* path, void* status) {
  return __lxstat(kStatVersion, path, status);
}

// glibc 2.34: they moved from libpthread, and so got versions of their own.
asm(".symver blobstore_old_once, pthread_once@" GLIBC);
asm(".symver blobstore_old_trylock, pthread_mutex_trylock@" GLIBC);
extern "C" int blobstore_old_once(pthread_once_t* once, void (*function)());
extern "C" int blobstore_old_trylock(pthread_mutex_t* mutex);
HIDDEN int blobstore_once(pthread_once_t* once, void (*function)()) asm("pthread_once");
HIDDEN int blobstore_trylock(pthread_mutex_t* mutex) asm("pthread_mutex_trylock");
int blobstore_once(pthread_once_t* once, void (*function)()) {
  return blobstore_old_once(once, function);
}
int blobstore_trylock(pthread_mutex_t* mutex) {
  return blobstore_old_trylock(mutex);
}

// GCC 9: std::runtime_error can be moved; before, it was copied, which shares its text.
extern "C" void blobstore_copy(void* error, const void* from) asm("_ZNSt13runtime_errorC2ERKS_");
HIDDEN void blobstore_move(void* error, void* from) asm("_ZNSt13runtime_errorC2EOS_");
void blobstore_move(void* error, void* from) {
  blobstore_copy(error, from);
}

// GCC 12: std::condition_variable::wait lost its noexcept, and so got a version of its own.
#define WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
asm(".symver blobstore_old_wait, " WAIT "@GLIBCXX_3.4.11");
extern "C" void blobstore_old_wait(std::condition_variable* condition, std::unique_lock<std::mutex>& lock);
HIDDEN void blobstore_wait(std::condition_variable* condition, std::unique_lock<std::mutex>& lock) asm(WAIT);
void blobstore_wait(std::condition_variable* condition, std::unique_lock<std::mutex>& lock) {
  blobstore_old_wait(condition, lock);
}

// GCC 11: std::exception_ptr counts by functions of its own, inside of those that its copies and destructors were
// before.
#define EXCEPTION_PTR "_ZNSt15__exception_ptr13exception_ptr"
extern "C" void blobstore_copy_exception(void* copy, void* const* exception) asm(EXCEPTION_PTR "C1ERKS0_");
extern "C" void blobstore_drop_exception(void** exception) asm(EXCEPTION_PTR "D1Ev");
HIDDEN void blobstore_addref(void* const* exception) asm(EXCEPTION_PTR "9_M_addrefEv");
HIDDEN void blobstore_release(void** exception) asm(EXCEPTION_PTR "10_M_releaseEv");
void blobstore_addref(void* const* exception) {
  void* counted; // never dropped
  blobstore_copy_exception(&counted, exception);
}
void blobstore_release(void** exception) {
  blobstore_drop_exception(exception);
  *exception = nullptr;
}
