#include <blobstore/tensors.h>

#include <cstring>

#include <blobstore/reading.h>

#include "logical/cache_tensors.h"
#include "logical/numbers.h"
#include "logical/tensor_over.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {

using namespace internal;
using executorch::extension::TensorPtr;

namespace {

/// Tensors as the library takes them; they refer to the caller's memory.
std::vector<Given> all_given(const StateDict& tensors) {
  std::vector<Given> given;
  for (const auto& [name, tensor] : tensors) {
    if (tensor == nullptr) {
      throw_error(ErrorKind::UnsupportedData, "'{}' is no tensor", name);
    }
    given.push_back(given_of(name, *tensor));
  }
  return given;
}

} // namespace

struct LogicalTensors::Impl : CacheTensors {
  using CacheTensors::CacheTensors;
};

LogicalTensors::LogicalTensors(std::shared_ptr<BlobCache> cache) : impl_(std::make_unique<Impl>(std::move(cache))) {}

LogicalTensors::~LogicalTensors() = default;

const std::shared_ptr<BlobCache>& LogicalTensors::cache() const {
  return impl_->cache();
}

std::vector<std::string> LogicalTensors::names() const {
  std::vector<std::string> names;
  for (const Tensor* tensor : impl_->updates().index().tensors()) {
    names.push_back(tensor->name());
  }
  return names;
}

bool LogicalTensors::contains(std::string_view name) const {
  return impl_->updates().index().find(name) != nullptr;
}

LogicalTensor LogicalTensors::at(std::string_view name) const {
  return impl_->updates().describe(name);
}

TensorPtr LogicalTensors::value(std::string_view name) const {
  impl_->cache()->check_open();
  const BlobCache::Reading reading(*impl_->cache());
  const TensorView found = impl_->updates().value(name);
  const TensorView copy = make_tensor(found.scalar_type, found.sizes);
  if (copy.nbytes != 0) {
    std::memcpy(filling(copy), found.data, copy.nbytes);
  }
  return tensor_over(copy);
}

Updated LogicalTensors::update(const StateDict& tensors, bool finite) const {
  return impl_->update(all_given(tensors), finite);
}

Updated LogicalTensors::update_state_dict(const StateDict& tensors, bool strict, bool finite) const {
  return impl_->update_state_dict(all_given(tensors), strict, finite);
}

} // namespace blobstore

namespace blobstore::internal {

const CacheTensors& TensorsAccess::of(const LogicalTensors& tensors) {
  return *tensors.impl_;
}

} // namespace blobstore::internal
