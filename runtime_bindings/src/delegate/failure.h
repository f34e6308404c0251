// How the delegate fails.
#pragma once

#include <string>

#include <executorch/runtime/core/error.h>

#include <blobstore/error.h>

namespace blobstore::internal {

/// Thrown inside the delegate. The backend catches it, because ExecuTorch is compiled without exceptions.
struct Failure {
  executorch::runtime::Error code;
  ErrorKind kind;
  std::string reason;
};

} // namespace blobstore::internal
