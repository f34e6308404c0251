#include <cstdint>
#include <memory>
#include <utility>

#include <blobstore/cache.h>

#include "format/dim_order.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {
namespace {

/// A tensor, and its layout as a Change refers to it.
struct OwnedTensor {
  executorch::extension::TensorPtr tensor;
  std::optional<Layout> layout;
};

} // namespace

Change::Change(std::string name, executorch::extension::TensorPtr tensor) : key(std::move(name)) {
  if (tensor == nullptr) {
    internal::throw_error(ErrorKind::UnsupportedData, "'{}' is no tensor", key);
  }
  Layout found = internal::layout_of(*tensor);
  data = tensor->const_data_ptr();
  size = tensor->nbytes();
  if (data == nullptr && size != 0) {
    internal::throw_error(ErrorKind::UnsupportedData, "'{}' has no data", key);
  }
  const auto owned = std::make_shared<OwnedTensor>(OwnedTensor{std::move(tensor), std::move(found)});
  layout = &owned->layout;
  owner = owned;
}

} // namespace blobstore
