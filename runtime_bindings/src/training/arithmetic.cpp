#include "training/arithmetic.h"

#include <cmath>

#include "os/processor.h"

namespace blobstore::internal {
namespace {

using executorch::aten::ScalarType;

/// What SGD does, with its options in the type of the numbers.
template <typename Number>
struct Descent {
  Number lr;
  Number momentum;
  Number fresh;
  Number decay;
  bool decays;
  bool nesterov;
  bool maximize;
  bool first;

  Descent(const SGDOptions& options, bool is_first)
      : lr(static_cast<Number>(-options.lr)),
        momentum(static_cast<Number>(options.momentum)),
        fresh(static_cast<Number>(1 - options.dampening)),
        decay(static_cast<Number>(options.weight_decay)),
        decays(options.weight_decay != 0),
        nesterov(options.nesterov),
        maximize(options.maximize),
        first(is_first) {}

  /// @param buffer the momentum, or null.
  BLOBSTORE_INLINE void run(size_t count, Number* parameter, const Number* gradient, Number* buffer) const {
    for (size_t i = 0; i < count; ++i) {
      Number change = maximize ? -gradient[i] : gradient[i];
      change = decays ? std::fma(decay, parameter[i], change) : change;
      if (buffer != nullptr) {
        buffer[i] = first ? change : std::fma(fresh, change, momentum * buffer[i]);
        change = nesterov ? std::fma(momentum, buffer[i], change) : buffer[i];
      }
      parameter[i] = std::fma(lr, change, parameter[i]);
    }
  }
};

/// What AdamW does.
template <typename Number>
struct Moments {
  Number shrink; // of the parameter
  Number lerp; // how much of the gradient comes into the mean
  Number keep; // of the square
  Number fresh;
  Number root;
  Number eps;
  Number lr;
  bool maximize;

  Moments(const AdamWOptions& options, double step)
      : shrink(static_cast<Number>(1 - options.lr * options.weight_decay)),
        lerp(static_cast<Number>(1 - options.beta1)),
        keep(static_cast<Number>(options.beta2)),
        fresh(static_cast<Number>(1 - options.beta2)),
        root(static_cast<Number>(std::pow(1 - std::pow(options.beta2, step), 0.5))),
        eps(static_cast<Number>(options.eps)),
        lr(static_cast<Number>(-(options.lr / (1 - std::pow(options.beta1, step))))),
        maximize(options.maximize) {}

  BLOBSTORE_INLINE void run(
      size_t count, Number* parameter, const Number* gradient, Number* mean, Number* square, Number* most) const {
    const bool little = std::abs(lerp) < static_cast<Number>(0.5);
    const Number weight = little ? lerp : lerp - 1;
    for (size_t i = 0; i < count; ++i) {
      const Number change = maximize ? -gradient[i] : gradient[i];
      mean[i] = std::fma(weight, change - mean[i], little ? mean[i] : change);
      square[i] = std::fma(fresh * change, change, square[i] * keep);
      Number norm = square[i];
      if (most != nullptr) {
        norm = most[i] > norm || std::isnan(most[i]) ? most[i] : norm;
        most[i] = norm;
      }
      parameter[i] = parameter[i] * shrink + lr * mean[i] / (std::sqrt(norm) / root + eps);
    }
  }
};

template <typename Rule, typename... Pointers>
BLOBSTORE_FMA void run_fused(const Rule& rule, size_t count, Pointers... pointers) {
  rule.run(count, pointers...);
}

template <typename Rule, typename... Pointers>
void run(const Rule& rule, size_t count, Pointers... pointers) {
  if (has_fma()) {
    run_fused(rule, count, pointers...);
  } else {
    rule.run(count, pointers...);
  }
}

template <typename Number>
void sgd(const SGDOptions& options, const Numbers& numbers, void* momentum, bool first) {
  run(Descent<Number>(options, first),
      numbers.count,
      static_cast<Number*>(numbers.parameter),
      static_cast<const Number*>(numbers.gradient),
      static_cast<Number*>(momentum));
}

template <typename Number>
void adamw(const AdamWOptions& options, double step, const Numbers& numbers, void* mean, void* square, void* most) {
  run(Moments<Number>(options, step),
      numbers.count,
      static_cast<Number*>(numbers.parameter),
      static_cast<const Number*>(numbers.gradient),
      static_cast<Number*>(mean),
      static_cast<Number*>(square),
      static_cast<Number*>(most));
}

} // namespace

void step_sgd(const SGDOptions& options, const Numbers& numbers, void* momentum, bool first) {
  const auto step = numbers.scalar_type == ScalarType::Float ? &sgd<float> : &sgd<double>;
  step(options, numbers, momentum, first);
}

void step_adamw(
    const AdamWOptions& options, double step, const Numbers& numbers, void* mean, void* square, void* most) {
  const auto run_one = numbers.scalar_type == ScalarType::Float ? &adamw<float> : &adamw<double>;
  run_one(options, step, numbers, mean, square, most);
}

} // namespace blobstore::internal
