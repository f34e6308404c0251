// Writing and reading files in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <blobstore/cache.h>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {

using namespace nb::literals;

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
        std::vector<std::string> names;
        for (const nb::bytes& path : paths) {
          names.push_back(to_string(path));
        }
        const std::string name = to_string(target);
        const WithoutInterpreter release;
        return make_working_copy(names, name);
      },
      "paths"_a,
      "target"_a);
}

} // namespace blobstore::python
