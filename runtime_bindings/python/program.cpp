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
namespace et = executorch::runtime;

nb::tuple info(const et::Result<et::Tag>& tag, const et::TensorInfo* tensor, const std::string& name) {
  const auto kind = [&] {
    switch (tag.ok() ? tag.get() : et::Tag::ListBool) {
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
  return nb::make_tuple(kind(), tensor != nullptr ? layout_object(layout_of(*tensor)) : nb::none(), name);
}

nb::list inputs(const et::MethodMeta& method, const std::vector<std::string>& names) {
  nb::list out;
  for (size_t i = 0; i < method.num_inputs(); ++i) {
    const et::Result<et::Tag> tag = method.input_tag(i);
    const bool is_tensor = tag.ok() && tag.get() == et::Tag::Tensor;
    out.append(info(tag, is_tensor ? &method.input_tensor_meta(i).get() : nullptr, names[i]));
  }
  return out;
}

nb::list outputs(const et::MethodMeta& method) {
  nb::list out;
  for (size_t i = 0; i < method.num_outputs(); ++i) {
    const et::Result<et::Tag> tag = method.output_tag(i);
    const bool is_tensor = tag.ok() && tag.get() == et::Tag::Tensor;
    out.append(info(tag, is_tensor ? &method.output_tensor_meta(i).get() : nullptr, ""));
  }
  return out;
}

/// Run a method and return its first results.
nb::list call_first(const std::shared_ptr<Method>& method, size_t count, const nb::args& values) {
  const Arguments arguments(values, method->meta());
  Outputs results;
  {
    const WithoutInterpreter release;
    results = method->execute(arguments.list(), {count, arguments.in_place()});
  }
  return to_python(results, arguments.torch());
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
          [](const nb::bytes& path, std::shared_ptr<BlobCache> cache, std::shared_ptr<PackedStore> packed) {
            const std::string name = to_string(path);
            const WithoutInterpreter release;
            return Program::load(name, std::move(cache), std::move(packed));
          },
          "path"_a,
          "cache"_a,
          "packed"_a.none())
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
      .def("packed_cache_path", [](const Program& program) {
        std::string path;
        {
          const WithoutInterpreter release;
          path = program.packed_cache_path();
        }
        return to_bytes(path);
      });
}

} // namespace blobstore::python
