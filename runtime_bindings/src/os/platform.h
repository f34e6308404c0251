// The systems that the library is for. Everything that depends on the system is in this folder.
#pragma once

#if defined(_WIN32)
#error "blobstore_runtime does not run on Windows: it needs mmap, flock and fork"
#elif __SIZEOF_POINTER__ != 8
#error "blobstore_runtime needs a 64-bit system: offsets in files and memory have 64 bits"
#endif

// What only Linux has, and so Android: fallocate, mremap, /proc, and MADV_DONTNEED that brings the file's bytes back.
// The tests also run without it, on the code for other systems (-DBLOBSTORE_POSIX_ONLY=ON).
#if defined(__linux__) && !defined(BLOBSTORE_POSIX_ONLY)
#define BLOBSTORE_LINUX 1
#else
#define BLOBSTORE_LINUX 0
#endif
