#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/training.h>

#include "os/text.h"
#include "training/arithmetic.h"
#include "training/optimizer_state.h"

namespace blobstore BLOBSTORE_API {

namespace {

using internal::check_option;
using internal::format;
using internal::Numbers;
using internal::numbers_of;
using internal::one_group;
using internal::OptimizerState;
using internal::PlainValue;
using internal::RestoredState;
using internal::set_option;
using internal::step_sgd;
using internal::tensor_like;
using internal::throw_error;

constexpr char kSgd[] = "SGD";
constexpr char kMomentumBuffer[] = "momentum_buffer";

[[noreturn]] void refuse_sgd(const std::string& reason) {
  throw_error(ErrorKind::Training, "{}: {}", kSgd, reason);
}

void check(const SGDOptions& options) {
  check_option(kSgd, "lr", options.lr);
  check_option(kSgd, "momentum", options.momentum);
  check_option(kSgd, "weight_decay", options.weight_decay);
  if (!std::isfinite(options.dampening)) {
    refuse_sgd("dampening must be a finite number");
  }
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    refuse_sgd("nesterov needs a momentum and no dampening");
  }
}

} // namespace

Optimizer::~Optimizer() = default;

OptimizerState Optimizer::capture(const NamedTensors&) const {
  throw_error(
      ErrorKind::Unsupported,
      "the state of this optimizer cannot be saved or restored: only SGD and AdamW give access to theirs");
}

void Optimizer::restore(const OptimizerState&, const NamedTensors& parameters, const std::string&) {
  (void)capture(parameters);
}

struct SGD::State {
  std::map<std::string, std::vector<uint8_t>> momentum; // by the parameter's name, as many bytes
  PlainValue options = PlainValue::of_kind(PlainValue::Kind::Dict); // as they were restored
};

SGD::SGD(const SGDOptions& options) : options_(options), state_(std::make_unique<State>()) {
  check(options);
}

SGD::~SGD() = default;

void SGD::set_options(const SGDOptions& options) {
  check(options);
  options_ = options;
}

void SGD::step(const StateDict& parameters, const StateDict& gradients) {
  struct Part {
    Numbers numbers;
    std::vector<uint8_t>* momentum; // null without momentum
    bool first;
  };
  std::vector<Part> parts;
  std::map<std::string, std::vector<uint8_t>> made;
  for (const auto& [name, parameter] : parameters) {
    Part part{numbers_of(kSgd, name, *parameter, gradients), nullptr, false};
    if (options_.momentum != 0) {
      const auto known = state_->momentum.find(name);
      part.first = known == state_->momentum.end();
      part.momentum = part.first ? &(made[name] = std::vector<uint8_t>(parameter->nbytes())) : &known->second;
      if (part.momentum->size() != parameter->nbytes()) {
        refuse_sgd(format("parameter '{}' had another shape or dtype in an earlier step", name));
      }
    }
    parts.push_back(part);
  }
  state_->momentum.merge(made); // moves the nodes, so the parts stay valid
  for (const Part& part : parts) {
    step_sgd(options_, part.numbers, part.momentum == nullptr ? nullptr : part.momentum->data(), part.first);
  }
}

OptimizerState SGD::capture(const NamedTensors& parameters) const {
  OptimizerState saved = one_group(kSgd, parameters);
  PlainValue& options = saved.groups[0].options = state_->options;
  set_option(options, "lr", PlainValue::of(options_.lr));
  set_option(options, "momentum", PlainValue::of(options_.momentum));
  set_option(options, "dampening", PlainValue::of(options_.dampening));
  set_option(options, "weight_decay", PlainValue::of(options_.weight_decay));
  set_option(options, "nesterov", PlainValue::of(options_.nesterov));
  set_option(options, "maximize", PlainValue::of(options_.maximize));
  for (const auto& [name, parameter] : parameters) {
    const auto known = state_->momentum.find(name);
    if (known != state_->momentum.end()) {
      PlainValue& state = saved.state.emplace_back(name, PlainValue::of_kind(PlainValue::Kind::Dict)).second;
      state.set(kMomentumBuffer, tensor_like(*parameter, known->second));
    }
  }
  return saved;
}

void SGD::restore(const OptimizerState& saved, const NamedTensors& parameters, const std::string& path) {
  const RestoredState from(saved, kSgd, parameters, path);
  SGDOptions options;
  options.lr = from.number("lr");
  options.momentum = from.number("momentum");
  options.dampening = from.number("dampening");
  options.weight_decay = from.number("weight_decay");
  options.nesterov = from.flag("nesterov", false);
  options.maximize = from.flag("maximize", false);
  try {
    check(options);
  } catch (const Error& error) {
    from.refuse(error.reason());
  }
  auto state = std::make_unique<State>();
  state->options = from.options();
  for (const auto& parameter : parameters) {
    if (const PlainValue* kept = from.of(parameter.first)) {
      from.check_keys(*kept, parameter.first, {kMomentumBuffer});
      std::vector<uint8_t> buffer = from.memory(*kept, kMomentumBuffer, parameter);
      if (!buffer.empty()) {
        state->momentum.emplace(parameter.first, std::move(buffer));
      }
    }
  }
  options_ = options;
  state_ = std::move(state);
}

} // namespace blobstore
