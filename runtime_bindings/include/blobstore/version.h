// The version of the library: of these headers while an application is compiled, and of the library that it runs with.
#pragma once

#include <blobstore/export.h>

#define BLOBSTORE_VERSION_MAJOR 0
#define BLOBSTORE_VERSION_MINOR 1
#define BLOBSTORE_VERSION_PATCH 0

/// One number for `#if`: `#if BLOBSTORE_VERSION >= BLOBSTORE_MAKE_VERSION(0, 2, 0)`.
#define BLOBSTORE_MAKE_VERSION(major, minor, patch) ((major) * 1000000 + (minor) * 1000 + (patch))
#define BLOBSTORE_VERSION \
  BLOBSTORE_MAKE_VERSION(BLOBSTORE_VERSION_MAJOR, BLOBSTORE_VERSION_MINOR, BLOBSTORE_VERSION_PATCH)

namespace blobstore BLOBSTORE_API {

/// The version of the library as it was compiled, such as "0.1.0". If it is linked as a shared library, another one may
/// be found when the application starts than the one whose headers it was compiled with.
const char* version() noexcept;

} // namespace blobstore
