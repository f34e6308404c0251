#include <memory>
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

using namespace internal;

constexpr char kAdamW[] = "AdamW";

std::unique_ptr<OptimizerMemory> memory_of_adamw() {
  const std::vector<const char*> keys = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  return std::make_unique<OptimizerMemory>(kAdamW, /*counts=*/true, keys);
}

/// How many running averages are kept for each parameter.
size_t averages(const AdamWOptions& options) {
  return options.amsgrad ? 3 : 2;
}

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

AdamW::AdamW(const AdamWOptions& options) : options_(options), memory_(memory_of_adamw()) {
  check(options);
}

AdamW::~AdamW() = default;

void AdamW::set_options(const AdamWOptions& options) {
  check(options);
  if (options.amsgrad != options_.amsgrad && !memory_->empty()) {
    refuse_adamw("amsgrad cannot change after a step");
  }
  options_ = options;
}

void AdamW::step(const StateDict& parameters, const StateDict& gradients) {
  for (const auto& [numbers, kept] : memory_->prepare(parameters, gradients, averages(options_))) {
    kept->steps += 1;
    step_adamw(
        options_,
        static_cast<double>(kept->steps),
        numbers,
        kept->tensors[0].data(),
        kept->tensors[1].data(),
        options_.amsgrad ? kept->tensors[2].data() : nullptr);
  }
}

OptimizerState AdamW::capture(const NamedTensors& parameters) const {
  OptimizerState saved = memory_->capture(parameters);
  PlainValue& options = saved.groups[0].options;
  set_option(options, "lr", PlainValue::of(options_.lr));
  set_option(options, "betas", PlainValue::pair(options_.beta1, options_.beta2));
  set_option(options, "eps", PlainValue::of(options_.eps));
  set_option(options, "weight_decay", PlainValue::of(options_.weight_decay));
  set_option(options, "amsgrad", PlainValue::of(options_.amsgrad));
  set_option(options, "maximize", PlainValue::of(options_.maximize));
  set_option(options, "decoupled_weight_decay", PlainValue::of(true));
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
  from.accept([&] { check(options); });
  auto memory = memory_of_adamw();
  memory->restore(from, parameters, averages(options));
  options_ = options;
  memory_ = std::move(memory);
}

} // namespace blobstore
