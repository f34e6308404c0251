// What ExecuTorch prints on standard error. An application in C++ registers a function of its own for that; the Python
// module has an ExecuTorch of its own, so the function is this one.
#include <string>
#include <string_view>
#include <utility>

#include <executorch/runtime/platform/platform.h>
#include <nanobind/stl/string.h>

#include "convert.h"

namespace blobstore::python {
namespace {

namespace et = executorch::runtime;

pal_emit_log_message_method print = nullptr;

/// The operator of the last kernel that failed in this thread. ExecuTorch says which only in its log.
thread_local std::string failed_operator;

void note_failed_operator(std::string_view message) {
  constexpr std::string_view kBefore = " in operator ";
  const size_t start = message.find(kBefore);
  if (message.substr(0, 17) == "KernelCall failed" && start != std::string_view::npos) {
    const std::string_view rest = message.substr(start + kBefore.size());
    failed_operator = rest.substr(0, rest.rfind(": "));
  }
}

/// ExecuTorch's cache of packed weights reads a file, and then tries to lock it for itself, to append to it. It must
/// not: all processes share the file. It logs that as an error, at every load.
bool is_expected(std::string_view file, std::string_view message) {
  const bool is_lock = message.substr(0, 6) == "flock(" || message.substr(0, 5) == "open(";
  const bool is_ours = message.find(".packed) failed (errno=") != std::string_view::npos ||
      message.find("(/proc/self/fd/") != std::string_view::npos; // a file that is being built
  return (file == "XNNWeightsCache.cpp" && is_lock && is_ours) || file == "cpuinfo_utils.cpp"; // which looks for phones
}

void print_others(
    et_timestamp_t time,
    et_pal_log_level_t level,
    const char* file,
    const char* function,
    size_t line,
    const char* message,
    size_t length) {
  note_failed_operator({message, length});
  if (!is_expected(file, {message, length})) {
    print(time, level, file, function, line, message, length);
  }
}

/// Stand before what prints. ExecuTorch's own module, where it is loaded later, takes the place.
void stand_before_print() {
  const pal_emit_log_message_method now = et::get_pal_impl()->emit_log_message;
  if (now != print_others) {
    print = now;
    et::register_pal(et::PalImpl::create(print_others, __FILE__));
  }
}

} // namespace

void add_logs(nb::module_& module) {
  stand_before_print();
  module.def(
      "take_failed_operator",
      [] {
        stand_before_print();
        return std::exchange(failed_operator, {});
      },
      "The operator of the last kernel that failed in this thread since the last call; empty if none did.");
}

} // namespace blobstore::python
