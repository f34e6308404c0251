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
#include "program/values.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;
namespace et = executorch::runtime;

/// (kind, layout or None, name)
nb::tuple info(const internal::ValueInfo& value, const std::string& name) {
  const auto kind = [&] {
    switch (value.tag.value_or(et::Tag::ListBool)) {
      case et::Tag::None:
        return "none";
      case et::Tag::Tensor:
        return "tensor";
      case et::Tag::Int:
        return "int";
      case et::Tag::Double:
        return "float";
      case et::Tag::Bool:
        return "bool";
      case et::Tag::String:
        return "str";
      default:
        return "other";
    }
  };
  return nb::make_tuple(kind(), value.is_tensor() ? layout_object(value.layout) : nb::none(), name);
}

nb::list inputs(const et::MethodMeta& method, const std::vector<std::string>& names) {
  nb::list out;
  for (const internal::ValueInfo& value : internal::input_infos(method)) {
    out.append(info(value, names[out.size()]));
  }
  return out;
}

nb::list outputs(const et::MethodMeta& method) {
  nb::list out;
  for (const internal::ValueInfo& value : internal::output_infos(method)) {
    out.append(info(value, ""));
  }
  return out;
}

/// Run a method and return its first results.
nb::list call_first(const std::shared_ptr<Method>& method, size_t count, const nb::args& values) {
  const Arguments arguments(values, method->meta());
  const auto run = [&] { return method->execute(arguments.list(), {count, arguments.in_place()}); };
  return to_python(without_interpreter(run), arguments.torch());
}

nb::list call(const std::shared_ptr<Method>& method, const nb::args& values) {
  return call_first(method, SIZE_MAX, values);
}

} // namespace

void add_programs(nb::module_& module) {
  nb::class_<Method>(module, "Method")
      .def_prop_ro("name", &Method::name)
      .def("inputs", [](const Method& method) { return inputs(method.meta(), method.input_names()); })
      .def("outputs", [](const Method& method) { return outputs(method.meta()); })
      .def("__call__", &call)
      .def("call_first", &call_first)
      .def(
          "output_memory",
          [](Method& method, size_t index) { return to_python(method.output_memory(index), /*torch=*/true); })
      .def("state_memory", [](Method& method) {
        nb::dict out;
        for (const auto& [name, tensor] : method.state_memory()) {
          out[nb::str(name.data(), name.size())] = to_python(tensor, /*torch=*/true);
        }
        return out;
      });

  nb::class_<Program>(module, "Program")
      .def_static(
          "load",
          [](const RawText& path, std::shared_ptr<BlobCache> cache, std::shared_ptr<PackedStore> packed) {
            return Program::load(path, std::move(cache), std::move(packed));
          },
          "path"_a,
          "cache"_a,
          "packed"_a.none(),
          nb::call_guard<WithoutInterpreter>())
      .def_prop_ro("methods", &Program::methods)
      .def("needs", &Program::needs)
      .def("backends", &Program::backends)
      .def(
          "inputs",
          [](const Program& program, const std::string& name) {
            return inputs(program.method_meta(name), program.input_names(name));
          })
      .def(
          "outputs", [](const Program& program, const std::string& name) { return outputs(program.method_meta(name)); })
      .def("load_method", &Program::load_method, "name"_a, nb::call_guard<WithoutInterpreter>())
      .def(
          "packed_cache_path",
          [](const Program& program) { return RawText(program.packed_cache_path()); },
          nb::call_guard<WithoutInterpreter>());
}

} // namespace blobstore::python
