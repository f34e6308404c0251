// The network of examples/xor.py, which the tests of training train.
#pragma once

#include <blobstore/training.h>

#include "helpers.h"

struct Batch {
  executorch::extension::TensorPtr inputs =
      executorch::extension::make_tensor_ptr({4, 2}, {0.0f, 0.0f, 0.0f, 1.0f, 1.0f, 0.0f, 1.0f, 1.0f});
  executorch::extension::TensorPtr labels =
      executorch::extension::make_tensor_ptr({4}, {int64_t{0}, int64_t{1}, int64_t{1}, int64_t{0}});
};

inline std::vector<std::vector<float>> numbers(const blobstore::TrainingProgram& training) {
  std::vector<std::vector<float>> all;
  for (const auto& [name, tensor] : training.named_parameters()) {
    all.push_back(numbers(*tensor));
  }
  return all;
}
