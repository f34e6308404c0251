#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using internal::attempt;

Result<Missing> missing(
    const std::string& index, const std::string& directory, const ReleaseOptions& options) noexcept {
  return attempt([&] { return blobstore::missing(index, directory, options); });
}

Result<InstalledRelease> commit(
    const std::string& index, const std::string& directory, const ReleaseOptions& options) noexcept {
  return attempt([&] { return blobstore::commit(index, directory, options); });
}

Result<InstalledRelease> pull(
    const std::string& url,
    const std::string& directory,
    const Download& download,
    const ReleaseOptions& options) noexcept {
  return attempt([&] { return blobstore::pull(url, directory, download, options); });
}

Result<Collected> gc(const std::string& directory, uint64_t keep) noexcept {
  return attempt([&] { return blobstore::gc(directory, keep); });
}

Result<std::shared_ptr<Release>> open_release(const std::string& directory, const OpenOptions& options) noexcept {
  return attempt([&] { return Release::open(directory, options); });
}

Result<Followed> follow(Release& release, FollowAdapters adapters) noexcept {
  return attempt([&] { return release.follow(adapters); });
}

} // namespace nothrow
} // namespace blobstore
