#include <cmath>
#include <memory>
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

using namespace internal;

constexpr char kSgd[] = "SGD";

[[noreturn]] void refuse_sgd(const std::string& reason) {
  throw_error(ErrorKind::Training, "{}: {}", kSgd, reason);
}

std::unique_ptr<OptimizerMemory> memory_of_sgd() {
  return std::make_unique<OptimizerMemory>(kSgd, /*counts=*/false, std::vector<const char*>{"momentum_buffer"});
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

SGD::SGD(const SGDOptions& options) : options_(options), memory_(memory_of_sgd()) {
  check(options);
}

SGD::~SGD() = default;

void SGD::set_options(const SGDOptions& options) {
  check(options);
  options_ = options;
}

void SGD::step(const StateDict& parameters, const StateDict& gradients) {
  for (const auto& [numbers, kept] : memory_->prepare(parameters, gradients, options_.momentum != 0 ? 1 : 0)) {
    if (kept == nullptr) {
      step_sgd(options_, numbers, nullptr, false);
      continue;
    }
    step_sgd(options_, numbers, kept->tensors[0].data(), /*first=*/kept->steps == 0);
    kept->steps = 1;
  }
}

OptimizerState SGD::capture(const NamedTensors& parameters) const {
  OptimizerState saved = memory_->capture(parameters);
  PlainValue& options = saved.groups[0].options;
  set_option(options, "lr", PlainValue::of(options_.lr));
  set_option(options, "momentum", PlainValue::of(options_.momentum));
  set_option(options, "dampening", PlainValue::of(options_.dampening));
  set_option(options, "weight_decay", PlainValue::of(options_.weight_decay));
  set_option(options, "nesterov", PlainValue::of(options_.nesterov));
  set_option(options, "maximize", PlainValue::of(options_.maximize));
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
  from.accept([&] { check(options); });
  auto memory = memory_of_sgd();
  memory->restore(from, parameters, 1);
  options_ = options;
  memory_ = std::move(memory);
}

} // namespace blobstore
