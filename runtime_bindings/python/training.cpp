// Training programs in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <blobstore/training.h>

#include "convert.h"
#include "interpreter.h"
#include "training/publish.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;

/// In the order of the program.
nb::dict in_order(const TrainingProgram& training, const StateDict& tensors) {
  nb::dict out;
  for (const std::string& name : training.names()) {
    out[nb::str(name.data(), name.size())] = to_python(tensors.at(name), /*torch=*/true);
  }
  return out;
}

} // namespace

void add_training(nb::module_& module) {
  nb::class_<TrainingProgram>(module, "TrainingProgram")
      .def_static(
          "load",
          [](std::shared_ptr<Program> program, const std::string& method) {
            const WithoutInterpreter release;
            return std::make_shared<TrainingProgram>(std::move(program), method);
          },
          "program"_a,
          "method"_a)
      .def_prop_ro("method", &TrainingProgram::method)
      .def_prop_ro("outputs", &TrainingProgram::outputs, "The number of outputs of the model.")
      .def_prop_ro("nameless", &TrainingProgram::nameless, "The number of buffers that have no names.")
      .def(
          "parameters", [](const TrainingProgram& training) { return in_order(training, training.named_parameters()); })
      .def("gradients", [](const TrainingProgram& training) { return in_order(training, training.named_gradients()); })
      .def(
          "publish",
          [](TrainingProgram& training, nb::handle target, bool strict, bool finite) {
            const internal::CacheTensors& on_cache = tensors_on_cache(target);
            const WithoutInterpreter release;
            return internal::TrainingAccess::publish(training, on_cache, strict, finite);
          },
          "target"_a,
          "strict"_a,
          "finite"_a,
          "The target is an object of the class Tensors.");
}

} // namespace blobstore::python
