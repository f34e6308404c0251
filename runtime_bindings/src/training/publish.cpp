#include "training/publish.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <string_view>

#include <blobstore/error.h>
#include <blobstore/reading.h>

#include "os/text.h"

namespace blobstore::internal {
namespace {

/// Whether `publish` omits a tensor: state of the serving programs or, unless `strict`, one that cannot change.
bool is_ignored(const Tensor& tensor, bool strict) {
  return !tensor.refusal.empty() && (tensor.auxiliary || !strict);
}

/// A copy of a blob. The caller holds a Reading.
Given copy_of(const std::string& name, const Blob& blob) {
  auto bytes = std::make_shared<std::vector<uint8_t>>(blob.data, blob.data + blob.size);
  Given out;
  out.name = name;
  out.value.scalar_type = blob.layout->scalar_type;
  out.value.sizes.assign(blob.layout->sizes.begin(), blob.layout->sizes.end());
  out.value.data = bytes->data();
  out.value.nbytes = bytes->size();
  out.value.owner = std::move(bytes);
  out.dim_order = blob.layout->dim_order;
  return out;
}

/// The tensors that the target needs, beside some, in order to change these: all that are made into the same blobs, and
/// all that those are made into.
std::vector<const Tensor*> needed_beside(const std::vector<Given>& tensors, const Index& index) {
  std::vector<const Tensor*> all;
  std::set<const Tensor*> seen;
  for (const Given& one : tensors) {
    if (const Tensor* tensor = index.find(one.name)) {
      all.push_back(tensor);
      seen.insert(tensor);
    }
  }
  const size_t given = all.size();
  for (size_t i = 0; i < all.size(); ++i) {
    for (const Record* record : all[i]->made_into) {
      for (const auto& source : record->sources) {
        const Tensor& need = index.tensor_of(source);
        if (seen.insert(&need).second) {
          all.push_back(&need);
        }
      }
    }
  }
  return {all.begin() + static_cast<std::ptrdiff_t>(given), all.end()};
}

/// Copies of the frozen tensors that the target needs in order to change the others: those that the trained program has
/// in its own data files.
std::vector<Given> frozen_parts(const Trained& trained, const std::vector<Given>& tensors, const Index& index) {
  const std::vector<std::string> needs = trained.program.needs(trained.method);
  const std::set<std::string_view> own(needs.begin(), needs.end());
  std::vector<Given> parts;
  const BlobCache& cache = *trained.program.cache();
  const BlobCache::Reading reading(cache);
  for (const Tensor* need : needed_beside(tensors, index)) {
    for (const std::string_view name : need->names) {
      const Blob* blob = own.count(name) != 0 ? cache.find(name) : nullptr;
      if (blob != nullptr && blob->layout) {
        parts.push_back(copy_of(std::string(name), *blob));
      }
    }
  }
  return parts;
}

/// The error for parameters that nothing takes from the target.
Error untaken(const CacheTensors& target, const Names& names) {
  std::string instead;
  for (const std::string_view name : names) {
    Names similar = target.updates().similar(name);
    for (const std::string_view idle : target.without_takers(similar)) {
      similar.erase(std::find(similar.begin(), similar.end(), idle));
    }
    if (!similar.empty()) {
      instead = format("; '{}' may be {} there", name, some(similar, "or"));
      break;
    }
  }
  return Error(
      ErrorKind::Update,
      format(
          "{}: nothing was published, because no program that serves takes {} from it{}",
          target.cache()->name(),
          some(names),
          instead));
}

} // namespace

Updated publish(const Trained& trained, const CacheTensors& target, bool strict, bool finite, Turns& turns) {
  const BlobCache& cache = *target.cache();
  cache.check_open();
  const Index& index = target.updates().index();
  Names known; // parameters that the target has
  Names missing;
  for (const auto& [name, tensor] : trained.parameters) {
    (index.find(name) != nullptr || cache.find(name) != nullptr ? known : missing).push_back(name);
  }
  if (strict && !missing.empty()) {
    throw_error(
        ErrorKind::KeyNotFound,
        "{}: lacks the parameters {} of {}",
        cache.name(),
        quoted(missing),
        trained.program.path());
  }
  Names names;
  std::vector<Given> tensors;
  for (const NamedTensors* part : {&trained.parameters, &trained.buffers}) {
    for (const auto& [name, tensor] : *part) {
      names.push_back(name);
      const Tensor* found = index.find(name);
      if (cache.find(name) != nullptr || (found != nullptr && !is_ignored(*found, strict))) {
        tensors.push_back(given_of(name, *tensor)); // in its memory, which must not change before the commit
      }
    }
  }
  if (tensors.empty()) {
    throw target.updates().mismatch(names);
  }
  if (strict) {
    std::vector<Shaped> shapes;
    for (const Given& one : tensors) {
      shapes.push_back({one.name, one.value.scalar_type, one.value.sizes});
    }
    target.check_reach(shapes, /*whole=*/false);
  }
  const Names idle = target.without_takers(known);
  if (!idle.empty() && (strict || idle.size() == known.size())) {
    throw untaken(target, idle);
  }
  std::vector<Given> frozen = frozen_parts(trained, tensors, index);
  tensors.insert(tensors.end(), frozen.begin(), frozen.end());
  const std::lock_guard<Turns> turn(turns); // committed in place: copying them would take longer than the commit
  return target.update(tensors, finite, strict);
}

} // namespace blobstore::internal
