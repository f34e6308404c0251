// The commit of trained tensors to the programs on a cache.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

#include <blobstore/program.h>
#include <blobstore/training.h>

#include "logical/cache_tensors.h"
#include "training/optimizer_state.h"
#include "training/turns.h"

namespace blobstore::internal {

/// What a program has trained. Refers to members of the training program.
struct Trained {
  const Program& program;
  const std::string& method;
  const NamedTensors& parameters;
  const NamedTensors& buffers;
};

/// See `TrainingProgram::publish`. Takes a turn for the commit.
Updated publish(const Trained& trained, const CacheTensors& target, bool strict, bool finite, Turns& turns);

/// Lets the Python module publish to the tensors that it keeps.
struct TrainingAccess {
  static Updated publish(TrainingProgram& training, const CacheTensors& target, bool strict, bool finite);
};

} // namespace blobstore::internal
