// Merging adapters into the weights of a cache.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <blobstore/adapters.h>

#include "adapters/on_cache.h"
#include "logical/cache_tensors.h"

namespace blobstore::internal {

/// `MergeOptions` with views of the weights.
struct MergeChoices {
  double alpha = 1;
  std::optional<double> scale;
  std::map<std::string, std::string> names;
  NamedViews weights;
  bool tied = false;
};

// The functions of the public header, for what `LogicalTensors` and the Python module share.
std::unique_ptr<MergedAdapter> merge_adapter(
    const CacheTensors& tensors, const std::string& path, const MergeChoices& choices);
std::unique_ptr<MergedAdapter> merge_adapter(
    const CacheTensors& tensors, const NamedViews& adapter, const MergeChoices& choices);

} // namespace blobstore::internal
