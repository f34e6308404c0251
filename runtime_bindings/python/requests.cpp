// Requests to language models in Python. The Python side calls the runners.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <blobstore/runners.h>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;

/// Let Python handle a signal, such as Ctrl-C. Called without the lock.
void check_signals() {
  const nb::gil_scoped_acquire acquire;
  const int failed = run_python([] { return PyErr_CheckSignals(); });
  if (failed != 0) {
    throw nb::python_error();
  }
}

std::unique_ptr<RunnerQueue::Turn> begin(
    RunnerQueue& queue,
    const std::string& prompt,
    const std::string& adapter,
    double strength,
    std::shared_ptr<Conversation> conversation,
    std::shared_ptr<Stop> stop) {
  const RequestOptions options{adapter, strength, std::move(conversation), std::move(stop)};
  const WithoutInterpreter release;
  return queue.begin(prompt, options, &check_signals);
}

} // namespace

void add_requests(nb::module_& module) {
  nb::class_<Stop>(module, "Stop")
      .def(nb::init<>())
      .def("set", &Stop::set, nb::call_guard<WithoutInterpreter>())
      .def("is_set", &Stop::is_set);
  nb::class_<Conversation>(module, "Conversation")
      .def(nb::init<std::string>(), "text"_a)
      .def("text", &Conversation::text);
  nb::class_<RunnerQueue::Turn>(module, "Turn")
      .def_prop_ro("runner", &RunnerQueue::Turn::runner)
      .def_prop_ro("resets", &RunnerQueue::Turn::resets)
      .def_prop_ro("prompt", &RunnerQueue::Turn::prompt)
      .def("stopped", &RunnerQueue::Turn::stopped)
      .def("finish", &RunnerQueue::Turn::finish, "answer"_a, "last"_a)
      .def("end", &RunnerQueue::Turn::end, nb::call_guard<WithoutInterpreter>());
  nb::class_<RunnerQueue>(module, "RunnerQueue")
      .def(
          nb::init<const std::vector<std::shared_ptr<BlobCache>>&, std::optional<double>>(),
          "caches"_a,
          "program_scale"_a.none(),
          nb::call_guard<WithoutInterpreter>())
      .def(
          "set_adapter",
          [](RunnerQueue& queue, const std::string& name, const RawText& path) { queue.set_adapter(name, path); },
          "name"_a,
          "path"_a,
          nb::call_guard<WithoutInterpreter>())
      .def("remove_adapter", &RunnerQueue::remove_adapter, "name"_a)
      .def("adapters", &RunnerQueue::adapters)
      .def("begin", &begin, "prompt"_a, "adapter"_a, "strength"_a, "conversation"_a.none(), "stop"_a.none())
      .def(
          "stats",
          [](const RunnerQueue& queue) {
            const RunnerStats now = queue.stats();
            nb::dict out;
            out["answered"] = now.answered;
            out["failed"] = now.failed;
            out["exchanges"] = now.exchanges;
            out["continued"] = now.continued;
            out["waiting"] = now.waiting;
            out["running"] = now.running;
            return out;
          })
      .def("close", &RunnerQueue::close)
      .def("closed", &RunnerQueue::closed);
  module.def(
      "runner_failure",
      [](const std::string& call, int number) { return to_exception(RunnerQueue::failure(call.c_str(), number)); },
      "call"_a,
      "number"_a);
}

} // namespace blobstore::python
