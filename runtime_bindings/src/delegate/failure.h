// How the delegate fails, and short names for what it has of ExecuTorch.
#pragma once

#include <string>

#include <executorch/runtime/core/error.h>

#include <blobstore/error.h>

namespace blobstore::internal {

namespace et = executorch::runtime;
using EtError = et::Error;

/// Thrown inside the delegate. The backend catches it, because ExecuTorch is compiled without exceptions.
struct Failure {
  EtError code;
  ErrorKind kind;
  std::string reason;
};

} // namespace blobstore::internal
