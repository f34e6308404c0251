// Training programs in Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <blobstore/mezo.h>
#include <blobstore/training.h>

#include "convert.h"
#include "interpreter.h"
#include "training/arithmetic.h"
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
            const auto publish = [&] {
              const WithoutInterpreter release;
              return internal::TrainingAccess::publish(training, on_cache, strict, finite);
            };
            return to_tuple(publish());
          },
          "target"_a,
          "strict"_a,
          "finite"_a,
          "The target is an object of the class Tensors.");

  nb::class_<MeZO>(module, "MeZO")
      .def(
          "__init__",
          [](MeZO* self,
             std::shared_ptr<BlobCache> cache,
             double lr,
             double eps,
             uint64_t seed,
             const std::vector<std::string>& names) {
            const WithoutInterpreter release;
            new (self) MeZO(std::move(cache), MeZOOptions{lr, eps, seed}, names);
          },
          "cache"_a,
          "lr"_a,
          "eps"_a,
          "seed"_a,
          "names"_a)
      .def_prop_ro("names", &MeZO::names)
      .def_prop_rw("steps", &MeZO::steps, &MeZO::set_steps)
      .def_prop_ro(
          "options",
          [](const MeZO& optimizer) {
            const MeZOOptions& options = optimizer.options();
            return nb::make_tuple(options.lr, options.eps, options.seed);
          })
      .def(
          "set_options",
          [](MeZO& optimizer, double lr, double eps, uint64_t seed) { optimizer.set_options({lr, eps, seed}); },
          "lr"_a,
          "eps"_a,
          "seed"_a)
      .def(
          "step",
          [](MeZO& optimizer, const nb::callable& loss) {
            const WithoutInterpreter release;
            return optimizer.step([&] {
              const nb::gil_scoped_acquire interpreter;
              return nb::cast<double>(loss());
            });
          },
          "loss"_a);

  module.def(
      "step_adamw",
      [](const std::array<uintptr_t, 5>& addresses,
         size_t count,
         bool is_double,
         double step,
         const std::array<double, 5>& numbers,
         bool maximize) {
        const auto at = [&](size_t index) { return reinterpret_cast<void*>(addresses[index]); };
        const auto [lr, beta1, beta2, eps, weight_decay] = numbers;
        const AdamWOptions options{lr, beta1, beta2, eps, weight_decay, addresses[4] != 0, maximize};
        const auto type = is_double ? executorch::aten::ScalarType::Double : executorch::aten::ScalarType::Float;
        const WithoutInterpreter release;
        internal::step_adamw(options, step, {type, count, at(0), at(1)}, at(2), at(3), at(4));
      },
      "addresses"_a,
      "count"_a,
      "is_double"_a,
      "step"_a,
      "numbers"_a,
      "maximize"_a,
      "The addresses of a parameter, its gradient and its averages, the last of which is 0 without amsgrad. The "
      "numbers "
      "are lr, both betas, eps and weight_decay.");
}

} // namespace blobstore::python
