#include <blobstore/version.h>

#define BLOBSTORE_TEXT_OF(value) #value
#define BLOBSTORE_TEXT(value) BLOBSTORE_TEXT_OF(value)

namespace blobstore BLOBSTORE_API {

const char* version() noexcept {
  return BLOBSTORE_TEXT(BLOBSTORE_VERSION_MAJOR) "." BLOBSTORE_TEXT(BLOBSTORE_VERSION_MINOR) "." BLOBSTORE_TEXT(
      BLOBSTORE_VERSION_PATCH);
}

} // namespace blobstore
