// Writing and reading files in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <blobstore/cache.h>
#include <blobstore/tensors.h>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {

using namespace nb::literals;

namespace {

/// The tensors of a file, as (scalar type, sizes, dim order, bytes) by name.
nb::dict load(const nb::bytes& path) {
  StateDict tensors;
  const std::string name = to_string(path);
  {
    const WithoutInterpreter release;
    tensors = load_state_dict(name);
  }
  nb::dict out;
  for (const auto& [key, tensor] : tensors) {
    nb::list sizes;
    nb::list order;
    for (const auto size : tensor->sizes()) {
      sizes.append(size);
    }
    for (const auto dim : tensor->dim_order()) {
      order.append(static_cast<int>(dim));
    }
    out[nb::str(key.data(), key.size())] = nb::make_tuple(
        static_cast<int>(tensor->scalar_type()),
        nb::tuple(sizes),
        nb::tuple(order),
        nb::bytes(tensor->const_data_ptr(), tensor->nbytes()));
  }
  return out;
}

} // namespace

void add_files(nb::module_& module) {
  module.def(
      "save",
      [](const BlobCache& cache, const nb::bytes& path, bool dirty_only) {
        const std::string name = to_string(path);
        const WithoutInterpreter release;
        return cache.save(name, dirty_only);
      },
      "cache"_a,
      "path"_a,
      "dirty_only"_a);
  module.def(
      "make_working_copy",
      [](const std::vector<nb::bytes>& paths, const nb::bytes& target) {
        const std::vector<std::string> names = to_strings(paths);
        const std::string name = to_string(target);
        const WithoutInterpreter release;
        return make_working_copy(names, name);
      },
      "paths"_a,
      "target"_a);
  module.def("load_state_dict", &load, "path"_a);
}

} // namespace blobstore::python
