// The outputs of a training method: where its gradients and parameters are, and their names.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/program.h>

namespace blobstore::internal {

/// The outputs of a training method, in order: those of the model, the gradients, the parameters.
struct Signature {
  size_t first_gradient = 0; // the number of the model's outputs
  std::vector<std::string> names; // of the parameters, in the order of the outputs
  size_t buffers = 0; // that the method changes; they are not among its outputs

  size_t first_parameter() const { return first_gradient + names.size(); }
};

/// Read the signature from the methods that ExecuTorch's training export adds to a program.
/// @throws Error Program: the program lacks these methods, or they contradict the outputs.
Signature read_signature(Program& program, const Method& method);

/// The error for a method that cannot be trained.
[[noreturn]] void throw_not_for_training(const Program& program, const Method& method, const std::string& reason);

} // namespace blobstore::internal
