// Program and Method in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <blobstore/program.h>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;

nb::list infos(const std::vector<ValueInfo>& values) {
  nb::list out;
  for (const ValueInfo& value : values) {
    constexpr const char* kKinds[] = {"none", "tensor", "int", "float", "bool", "str", "other"};
    out.append(
        nb::make_tuple(
            kKinds[static_cast<int>(value.kind)],
            value.kind == ValueKind::Tensor ? layout_object(value.layout) : nb::none(),
            value.name));
  }
  return out;
}

/// Run a method and return its first results.
nb::list call_first(const std::shared_ptr<Method>& method, size_t count, const nb::args& values) {
  const Arguments arguments(values, method->inputs());
  std::vector<Value> results;
  {
    const WithoutInterpreter release;
    results = method->execute(arguments.list(), count);
  }
  return to_python(std::move(results), arguments.torch());
}

nb::list call(const std::shared_ptr<Method>& method, const nb::args& values) {
  return call_first(method, SIZE_MAX, values);
}

/// A tensor over memory of a method. It holds the method.
nb::object to_torch(const std::shared_ptr<Method>& method, const View& view) {
  auto* pin = new std::shared_ptr<Method>(method);
  nb::capsule owner(pin, [](void* held) noexcept { delete static_cast<std::shared_ptr<Method>*>(held); });
  const nb::object bytes =
      nb::cast(nb::ndarray<nb::numpy, uint8_t>(static_cast<uint8_t*>(view.data), {view.nbytes}, owner));
  return run_python([&] { return helpers().to_torch(bytes, layout_object(view.layout)); });
}

} // namespace

void add_programs(nb::module_& module) {
  nb::class_<Method>(module, "Method")
      .def_prop_ro("name", &Method::name)
      .def("inputs", [](const Method& method) { return infos(method.inputs()); })
      .def("outputs", [](const Method& method) { return infos(method.outputs()); })
      .def("__call__", &call)
      .def("call_first", &call_first)
      .def(
          "output_memory",
          [](const std::shared_ptr<Method>& method, size_t index) {
            return to_torch(method, method->output_memory(index));
          })
      .def("state_memory", [](const std::shared_ptr<Method>& method) {
        nb::dict out;
        for (const auto& [name, view] : method->state_memory()) {
          out[nb::str(name.data(), name.size())] = to_torch(method, view);
        }
        return out;
      });

  nb::class_<Program>(module, "Program")
      .def_static(
          "load",
          [](const nb::bytes& path, std::shared_ptr<BlobCache> cache) {
            const std::string name = to_string(path);
            const WithoutInterpreter release;
            return Program::load(name, std::move(cache));
          },
          "path"_a,
          "cache"_a)
      .def_prop_ro("methods", &Program::methods)
      .def("needs", &Program::needs)
      .def("backends", &Program::backends)
      .def("inputs", [](const Program& program, const std::string& name) { return infos(program.inputs(name)); })
      .def("outputs", [](const Program& program, const std::string& name) { return infos(program.outputs(name)); })
      .def("load_method", &Program::load_method, "name"_a, nb::call_guard<WithoutInterpreter>());
}

} // namespace blobstore::python
