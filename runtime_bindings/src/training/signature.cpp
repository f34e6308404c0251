#include "training/signature.h"

#include <algorithm>
#include <set>

#include "os/text.h"

namespace blobstore::internal {

namespace et = executorch::runtime;

namespace {

std::string shown(const Outputs& outputs) {
  if (outputs.empty() || outputs[0].isNone()) {
    return "None";
  }
  return outputs[0].isInt() ? std::to_string(outputs[0].toInt()) : "no index";
}

/// The outputs of one of the methods that the export adds.
Outputs read(Program& program, const std::string& prefix, const Method& method) {
  return program.load_method(prefix + method.name())->execute({});
}

/// @param first of the gradients, which the parameters follow.
void check_tensors(const Program& program, const Method& method, size_t first) {
  const et::MethodMeta meta = method.meta();
  for (size_t i = first; i < meta.num_outputs(); ++i) {
    const et::Result<et::Tag> tag = meta.output_tag(i);
    if (!tag.ok() || tag.get() != et::Tag::Tensor) {
      throw_not_for_training(program, method, "a gradient or a parameter is not a tensor");
    }
  }
}

} // namespace

Signature read_signature(Program& program, const Method& method) {
  constexpr const char* kPrefixes[] = {
      "__et_training_gradients_index_", "__et_training_parameters_index_", "__et_training_fqn_"};
  const std::vector<std::string>& known = program.methods();
  std::vector<std::string> missing;
  for (const char* prefix : kPrefixes) {
    if (std::find(known.begin(), known.end(), prefix + method.name()) == known.end()) {
      missing.push_back(prefix + method.name());
    }
  }
  if (!missing.empty()) {
    throw_not_for_training(
        program, method, format("it lacks {}; export it with _export_forward_backward", in_quotes(missing)));
  }
  const Outputs gradients = read(program, kPrefixes[0], method);
  const Outputs parameters = read(program, kPrefixes[1], method);
  Signature found;
  bool fits = !gradients.empty() && gradients[0].isInt() && !parameters.empty() && parameters[0].isInt();
  size_t count = 0; // of names, including invalid ones
  const Outputs names = read(program, kPrefixes[2], method);
  for (const et::EValue& name : names) {
    ++count;
    if (name.isString() && !name.toString().empty()) {
      found.names.emplace_back(name.toString());
    }
  }
  const std::set<std::string> unique(found.names.begin(), found.names.end());
  const size_t total = method.meta().num_outputs();
  // Counted from the end, because ExecuTorch's indices also count the changed buffers, which are not among the outputs.
  fits = fits && unique.size() == count && 2 * count < total;
  if (fits) {
    const int64_t first = gradients[0].toInt();
    found.first_gradient = total - 2 * count;
    fits = first >= 0 && static_cast<uint64_t>(first) >= found.first_gradient && parameters[0].toInt() >= first &&
        static_cast<uint64_t>(parameters[0].toInt() - first) == count;
    found.buffers = fits ? static_cast<size_t>(first) - found.first_gradient : 0;
  }
  if (!fits) {
    throw_not_for_training(
        program,
        method,
        format(
            "its gradients should begin at output {} and its parameters at {}, for {} names, but it has {} outputs",
            shown(gradients),
            shown(parameters),
            count,
            total));
  }
  check_tensors(program, method, found.first_gradient);
  return found;
}

void throw_not_for_training(const Program& program, const Method& method, const std::string& reason) {
  throw_error_in(
      ErrorKind::Program, program.path(), "method '{}' is not a training program: {}", method.name(), reason);
}

} // namespace blobstore::internal
