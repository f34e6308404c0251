#include <memory>
#include <utility>

#include <blobstore/cache.h>

#include "os/text.h"

namespace blobstore BLOBSTORE_API {
namespace {

/// A tensor, and its layout as a Change refers to it.
struct OwnedTensor {
  std::shared_ptr<const void> tensor;
  std::optional<Layout> layout;
};

} // namespace

void Change::hold(const std::shared_ptr<const void>& tensor, const void* bytes, size_t nbytes, Layout found) {
  if (tensor == nullptr) {
    internal::throw_error(ErrorKind::UnsupportedData, "'{}' is no tensor", key);
  }
  if (bytes == nullptr && nbytes != 0) {
    internal::throw_error(ErrorKind::UnsupportedData, "'{}' has no data", key);
  }
  data = bytes;
  size = nbytes;
  const auto owned = std::make_shared<OwnedTensor>(OwnedTensor{tensor, std::move(found)});
  layout = &owned->layout;
  owner = owned;
}

} // namespace blobstore
