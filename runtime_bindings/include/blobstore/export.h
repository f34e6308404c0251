// What the shared library exports: all that is declared in a namespace with BLOBSTORE_API, but for namespaces with
// BLOBSTORE_HIDDEN, which the headers must name and applications do not call.
#pragma once

#ifdef BLOBSTORE_RUNTIME_SHARED // the build of the shared library defines it, and so does linking its CMake target
#define BLOBSTORE_API __attribute__((visibility("default")))
#define BLOBSTORE_HIDDEN __attribute__((visibility("hidden")))
#else // an application's classes must not be more visible than what they have as members
#define BLOBSTORE_API
#define BLOBSTORE_HIDDEN
#endif
