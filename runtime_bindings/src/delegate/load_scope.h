// The way of a load's plan through ExecuTorch, which hands nothing of an application to a backend.
#pragma once

#include "packed/load_plan.h"

namespace blobstore::internal {

/// Puts the plan of a load in force on this thread while ExecuTorch loads a method. BlobStoreBackend reads it where
/// ExecuTorch calls it, and passes it on; nothing else does. Does not own the plan or the result.
class LoadScope {
 public:
  LoadScope(const LoadPlan& plan, LoadResult& result);
  ~LoadScope();
  LoadScope(const LoadScope&) = delete;
  LoadScope& operator=(const LoadScope&) = delete;

  const LoadPlan& plan;
  LoadResult& result;

 private:
  const LoadScope* before_;
};

} // namespace blobstore::internal
