#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/training.h>

#include "os/text.h"

namespace blobstore BLOBSTORE_API {

namespace {

using executorch::aten::ScalarType;
using executorch::extension::TensorPtr;
using internal::format;

[[noreturn]] void refuse(const std::string& reason) {
  internal::throw_error(ErrorKind::Training, "SGD: {}", reason);
}

void check(const SGDOptions& options) {
  const std::pair<const char*, double> numbers[] = {
      {"lr", options.lr}, {"momentum", options.momentum}, {"weight_decay", options.weight_decay}};
  for (const auto& [name, number] : numbers) {
    if (!(number >= 0) || !std::isfinite(number)) {
      refuse(format("{} must be a finite number that is not negative, not {}", name, std::to_string(number)));
    }
  }
  if (!std::isfinite(options.dampening)) {
    refuse("dampening must be a finite number");
  }
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    refuse("nesterov needs a momentum and no dampening");
  }
}

/// One step of one parameter. @param momentum has as many numbers, or is null; @param first whether it has none yet.
template <typename Number>
void step_one(
    const SGDOptions& options, Number* parameter, const Number* gradient, Number* momentum, size_t count, bool first) {
  const auto lr = static_cast<Number>(options.lr);
  const auto rate = static_cast<Number>(options.momentum);
  const auto fresh = static_cast<Number>(1 - options.dampening);
  const auto decay = static_cast<Number>(options.weight_decay);
  for (size_t i = 0; i < count; ++i) {
    Number change = gradient[i] + decay * parameter[i];
    if (momentum != nullptr) {
      momentum[i] = first ? change : rate * momentum[i] + fresh * change;
      change = options.nesterov ? change + rate * momentum[i] : momentum[i];
    }
    parameter[i] -= lr * change;
  }
}

} // namespace

Optimizer::~Optimizer() = default;

struct SGD::Momentum {
  std::map<std::string, std::vector<uint8_t>> memory; // by the parameter's name, as many bytes
};

SGD::SGD(const SGDOptions& options) : options_(options), momentum_(std::make_unique<Momentum>()) {
  check(options);
}

SGD::~SGD() = default;

void SGD::set_options(const SGDOptions& options) {
  check(options);
  options_ = options;
}

void SGD::step(const StateDict& parameters, const StateDict& gradients) {
  struct Part {
    const TensorPtr& parameter;
    const TensorPtr& gradient;
    std::vector<uint8_t>* momentum; // null without momentum
    bool first;
  };
  std::vector<Part> parts;
  std::map<std::string, std::vector<uint8_t>> made;
  for (const auto& [name, parameter] : parameters) {
    const auto gradient = gradients.find(name);
    if (gradient == gradients.end() || gradient->second->nbytes() != parameter->nbytes()) {
      refuse(format("parameter '{}' has no gradient of its shape", name));
    }
    const ScalarType type = parameter->scalar_type();
    if (gradient->second->scalar_type() != type || (type != ScalarType::Float && type != ScalarType::Double)) {
      refuse(format("parameter '{}' and its gradient must both be float, or both double", name));
    }
    Part part{parameter, gradient->second, nullptr, false};
    if (options_.momentum != 0) {
      const auto known = momentum_->memory.find(name);
      part.first = known == momentum_->memory.end();
      part.momentum = part.first ? &(made[name] = std::vector<uint8_t>(parameter->nbytes())) : &known->second;
      if (part.momentum->size() != parameter->nbytes()) {
        refuse(format("parameter '{}' had another shape or dtype in an earlier step", name));
      }
    }
    parts.push_back(part);
  }
  momentum_->memory.merge(made); // moves the nodes, so the parts stay valid
  for (const Part& part : parts) {
    const auto count = static_cast<size_t>(part.parameter->numel());
    void* const momentum = part.momentum == nullptr ? nullptr : part.momentum->data();
    if (part.parameter->scalar_type() == ScalarType::Float) {
      step_one(
          options_,
          part.parameter->mutable_data_ptr<float>(),
          part.gradient->const_data_ptr<float>(),
          static_cast<float*>(momentum),
          count,
          part.first);
    } else {
      step_one(
          options_,
          part.parameter->mutable_data_ptr<double>(),
          part.gradient->const_data_ptr<double>(),
          static_cast<double*>(momentum),
          count,
          part.first);
    }
  }
}

} // namespace blobstore
