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
nb::dict load(const RawText& path) {
  nb::dict out;
  for (const auto& [key, tensor] : without_interpreter([&] { return load_state_dict(path); })) {
    const Layout layout = layout_of(*tensor);
    out[nb::str(key.data(), key.size())] = nb::make_tuple(
        static_cast<int>(layout.scalar_type),
        to_tuple(layout.sizes),
        to_tuple(layout.dim_order),
        nb::bytes(tensor->const_data_ptr(), tensor->nbytes()));
  }
  return out;
}

} // namespace

void add_files(nb::module_& module) {
  module.def(
      "save",
      [](const BlobCache& cache, const RawText& path, bool dirty_only) { return cache.save(path, dirty_only); },
      "cache"_a,
      "path"_a,
      "dirty_only"_a,
      nb::call_guard<WithoutInterpreter>());
  module.def(
      "make_working_copy",
      [](const std::vector<RawText>& paths, const RawText& target) {
        return make_working_copy({paths.begin(), paths.end()}, target);
      },
      "paths"_a,
      "target"_a,
      nb::call_guard<WithoutInterpreter>());
  module.def("load_state_dict", &load, "path"_a);
}

} // namespace blobstore::python
