#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
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
using internal::SavedTensor;
using internal::set_option;
using internal::step_adamw;
using internal::tensor_like;
using internal::throw_error;

constexpr char kAdamW[] = "AdamW";
constexpr char kStep[] = "step";
constexpr char kMean[] = "exp_avg";
constexpr char kSquare[] = "exp_avg_sq";
constexpr char kMost[] = "max_exp_avg_sq";

[[noreturn]] void refuse_adamw(const std::string& reason) {
  throw_error(ErrorKind::Training, "{}: {}", kAdamW, reason);
}

void check(const AdamWOptions& options) {
  check_option(kAdamW, "lr", options.lr);
  check_option(kAdamW, "eps", options.eps);
  check_option(kAdamW, "weight_decay", options.weight_decay);
  for (const double beta : {options.beta1, options.beta2}) {
    if (!(beta >= 0) || !(beta < 1)) { // NaN is neither
      refuse_adamw(format("betas must be at least 0 and less than 1, not {}", std::to_string(beta)));
    }
  }
}

} // namespace

struct AdamW::State {
  /// What is kept for one parameter.
  struct Kept {
    float steps = 0; // as torch counts them
    std::vector<uint8_t> mean; // as many bytes as the parameter
    std::vector<uint8_t> square;
    std::vector<uint8_t> most; // empty without amsgrad
  };

  std::map<std::string, Kept> kept; // by the parameter's name
  PlainValue options = PlainValue::of_kind(PlainValue::Kind::Dict); // as they were restored
};

AdamW::AdamW(const AdamWOptions& options) : options_(options), state_(std::make_unique<State>()) {
  check(options);
}

AdamW::~AdamW() = default;

void AdamW::set_options(const AdamWOptions& options) {
  check(options);
  if (options.amsgrad != options_.amsgrad && !state_->kept.empty()) {
    refuse_adamw("amsgrad cannot change after a step");
  }
  options_ = options;
}

void AdamW::step(const StateDict& parameters, const StateDict& gradients) {
  std::vector<std::pair<Numbers, State::Kept*>> parts;
  std::map<std::string, State::Kept> made;
  for (const auto& [name, parameter] : parameters) {
    const Numbers numbers = numbers_of(kAdamW, name, *parameter, gradients);
    const auto known = state_->kept.find(name);
    State::Kept& kept = known == state_->kept.end() ? made[name] : known->second;
    if (known == state_->kept.end()) {
      kept.mean.resize(parameter->nbytes());
      kept.square.resize(parameter->nbytes());
      kept.most.resize(options_.amsgrad ? parameter->nbytes() : 0);
    } else if (kept.mean.size() != parameter->nbytes()) {
      refuse_adamw(format("parameter '{}' had another shape or dtype in an earlier step", name));
    }
    parts.emplace_back(numbers, &kept);
  }
  state_->kept.merge(made); // moves the nodes, so the parts stay valid
  for (const auto& [numbers, kept] : parts) {
    kept->steps += 1;
    step_adamw(
        options_,
        static_cast<double>(kept->steps),
        numbers,
        kept->mean.data(),
        kept->square.data(),
        options_.amsgrad ? kept->most.data() : nullptr);
  }
}

OptimizerState AdamW::capture(const NamedTensors& parameters) const {
  OptimizerState saved = one_group(kAdamW, parameters);
  PlainValue& options = saved.groups[0].options = state_->options;
  set_option(options, "lr", PlainValue::of(options_.lr));
  set_option(options, "betas", PlainValue::pair(options_.beta1, options_.beta2));
  set_option(options, "eps", PlainValue::of(options_.eps));
  set_option(options, "weight_decay", PlainValue::of(options_.weight_decay));
  set_option(options, "amsgrad", PlainValue::of(options_.amsgrad));
  set_option(options, "maximize", PlainValue::of(options_.maximize));
  set_option(options, "decoupled_weight_decay", PlainValue::of(true));
  for (const auto& [name, parameter] : parameters) {
    const auto known = state_->kept.find(name);
    if (known == state_->kept.end()) {
      continue;
    }
    const State::Kept& kept = known->second;
    SavedTensor steps;
    steps.layout.scalar_type = static_cast<int8_t>(executorch::aten::ScalarType::Float);
    steps.bytes.resize(sizeof kept.steps);
    std::memcpy(steps.bytes.data(), &kept.steps, sizeof kept.steps);
    PlainValue& state = saved.state.emplace_back(name, PlainValue::of_kind(PlainValue::Kind::Dict)).second;
    state.set(kStep, PlainValue::of(std::move(steps)));
    state.set(kMean, tensor_like(*parameter, kept.mean));
    state.set(kSquare, tensor_like(*parameter, kept.square));
    if (options_.amsgrad) {
      state.set(kMost, tensor_like(*parameter, kept.most));
    }
  }
  return saved;
}

void AdamW::restore(const OptimizerState& saved, const NamedTensors& parameters, const std::string& path) {
  const RestoredState from(saved, kAdamW, parameters, path);
  AdamWOptions options;
  options.lr = from.number("lr");
  std::tie(options.beta1, options.beta2) = from.numbers("betas");
  options.eps = from.number("eps");
  options.weight_decay = from.number("weight_decay");
  options.amsgrad = from.flag("amsgrad", false);
  options.maximize = from.flag("maximize", false);
  if (!from.flag("decoupled_weight_decay", true)) {
    from.refuse("the saved AdamW decays weights through their gradients, as Adam does");
  }
  try {
    check(options);
  } catch (const Error& error) {
    from.refuse(error.reason());
  }
  auto state = std::make_unique<State>();
  state->options = from.options();
  for (const auto& parameter : parameters) {
    const auto& [name, tensor] = parameter;
    const PlainValue* values = from.of(name);
    if (values == nullptr) {
      continue;
    }
    from.check_keys(*values, name, {kStep, kMean, kSquare, kMost});
    State::Kept kept;
    kept.steps = from.steps(*values, name);
    kept.mean = from.memory(*values, kMean, parameter);
    kept.square = from.memory(*values, kSquare, parameter);
    kept.most = options.amsgrad ? from.memory(*values, kMost, parameter) : std::vector<uint8_t>();
    const size_t nbytes = tensor->nbytes();
    if (kept.mean.size() != nbytes || kept.square.size() != nbytes ||
        kept.most.size() != (options.amsgrad ? nbytes : 0)) {
      from.refuse(format("the saved state of '{}' lacks a running average", name));
    }
    state->kept.emplace(name, std::move(kept));
  }
  options_ = options;
  state_ = std::move(state);
}

} // namespace blobstore
