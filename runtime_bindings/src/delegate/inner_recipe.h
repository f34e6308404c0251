// What the inner backend of a delegate is initialized with, every time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>

#include "delegate/delegate_payload.h"
#include "delegate/failure.h"

namespace blobstore::internal {

/// What all initializations of one delegate have in common.
struct InnerRecipe {
  executorch::runtime::BackendInterface* backend = nullptr;
  DelegatePayload payload;
  std::vector<uint8_t> bytes; // the inner payload
  std::string method;
  std::vector<executorch::runtime::CompileSpec> specs; // they point into the program
  std::vector<executorch::runtime::BackendOption> options;
  // Guarded by the lock of InnerHandle. The delegate is destroyed, and perhaps with it what `specs` point into.
  mutable bool retired = false;
};

/// @throws Failure: the payload is damaged, or the backend is missing.
std::shared_ptr<const InnerRecipe> make_recipe(
    executorch::runtime::BackendInitContext& context,
    const executorch::runtime::FreeableBuffer& processed,
    executorch::runtime::ArrayRef<executorch::runtime::CompileSpec> specs);

} // namespace blobstore::internal
