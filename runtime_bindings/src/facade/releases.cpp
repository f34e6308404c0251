#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore::nothrow {

using internal::attempt;

Result<Missing> missing(
    const std::string& index, const std::string& directory, const ReleaseOptions& options) noexcept {
  return attempt([&] { return blobstore::missing(index, directory, options); });
}

Result<InstalledRelease> commit(
    const std::string& index, const std::string& directory, const ReleaseOptions& options) noexcept {
  return attempt([&] { return blobstore::commit(index, directory, options); });
}

} // namespace blobstore::nothrow
