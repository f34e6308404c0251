// The arithmetic of the optimizers: what each does to the numbers of one parameter. The operations and their order are
// those of torch.optim on a processor that multiplies and adds with one rounding, so results are equal to the bit,
// except that square roots are always rounded correctly. On a processor without such instructions, the results are the
// same.
#pragma once

#include <cstddef>

#include <executorch/runtime/core/exec_aten/exec_aten.h>

#include <blobstore/training.h>

namespace blobstore::internal {

/// The numbers of one parameter and their gradients: dense, in the same order.
struct Numbers {
  executorch::aten::ScalarType scalar_type; // Float or Double
  size_t count;
  void* parameter;
  const void* gradient;
};

/// @param momentum as many numbers, or null without momentum. @param first whether it has none yet.
void step_sgd(const SGDOptions& options, const Numbers& numbers, void* momentum, bool first);

/// @param step the number of this step, counted from 1.
/// @param mean, square running averages of the gradient and its square. @param most the largest `square` so far; null
///   without amsgrad.
void step_adamw(const AdamWOptions& options, double step, const Numbers& numbers, void* mean, void* square, void* most);

} // namespace blobstore::internal
