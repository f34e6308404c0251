#include <blobstore/error.h>

namespace blobstore BLOBSTORE_API {

// Here and not in the header, so that the type exists once, also if applications are compiled without exceptions.
Error::~Error() = default;

} // namespace blobstore
