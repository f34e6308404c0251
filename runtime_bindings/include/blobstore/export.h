// What the shared library exports: all that is declared in a namespace with this attribute.
#pragma once

#ifdef BLOBSTORE_RUNTIME_SHARED // the build of the shared library defines it, and so does linking its CMake target
#define BLOBSTORE_API __attribute__((visibility("default")))
#else
#define BLOBSTORE_API
#endif

// What the headers must name and applications do not call.
#define BLOBSTORE_HIDDEN __attribute__((visibility("hidden")))
