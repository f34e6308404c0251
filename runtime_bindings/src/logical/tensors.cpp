#include <blobstore/tensors.h>

#include <algorithm>
#include <cstring>
#include <set>

#include <blobstore/reading.h>

#include "logical/cache_tensors.h"
#include "logical/numbers.h"
#include "logical/tensor_over.h"

namespace blobstore {

using namespace internal;
using executorch::extension::TensorPtr;

namespace {

/// Tensors as the library takes them; they refer to the caller's memory.
std::vector<Given> given_of(const StateDict& tensors) {
  std::vector<Given> given;
  for (const auto& [name, tensor] : tensors) {
    if (tensor == nullptr) {
      throw Error(ErrorKind::UnsupportedData, "'" + name + "' is no tensor");
    }
    Given one;
    one.name = name;
    one.value.scalar_type = static_cast<int8_t>(tensor->scalar_type());
    one.value.sizes.assign(tensor->sizes().begin(), tensor->sizes().end());
    one.value.data = static_cast<const uint8_t*>(tensor->const_data_ptr());
    one.value.nbytes = tensor->nbytes();
    one.dim_order.assign(tensor->dim_order().begin(), tensor->dim_order().end());
    given.push_back(std::move(one));
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
  const Index& index = impl_->updates().index();
  const Tensor* tensor = index.find(name);
  if (tensor == nullptr) {
    throw impl_->updates().unknown(name);
  }
  LogicalTensor out;
  out.name = tensor->name();
  out.scalar_type = tensor->scalar_type;
  out.sizes = tensor->sizes;
  out.aliases.assign(tensor->names.begin() + 1, tensor->names.end());
  std::set<std::string> needs;
  for (const Record* record : tensor->made_into) {
    out.keys.push_back(record->key);
    for (const SourceTensor& source : record->sources) {
      needs.insert(index.tensor_of(source).name());
    }
  }
  needs.erase(out.name);
  out.needs.assign(needs.begin(), needs.end());
  out.refusal = tensor->refusal;
  out.auxiliary = tensor->auxiliary;
  return out;
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

uint64_t LogicalTensors::update(const StateDict& tensors, bool finite) const {
  return impl_->update(given_of(tensors), finite);
}

uint64_t LogicalTensors::update_state_dict(const StateDict& tensors, bool strict, bool finite) const {
  return impl_->update_state_dict(given_of(tensors), strict, finite);
}

} // namespace blobstore

namespace blobstore::internal {

const CacheTensors& TensorsAccess::of(const LogicalTensors& tensors) {
  return *tensors.impl_;
}

} // namespace blobstore::internal
