// Exchanging the adapter of a cache, and changing its strength, while programs run.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/adapters.h>

#include "logical/cache_tensors.h"

namespace blobstore::internal {

// The functions of the public header, for what `LogicalTensors` and the Python module share.
uint64_t load_adapter(const CacheTensors& tensors, const std::string& path, const AdapterOptions& options);
uint64_t set_adapter_strength(const CacheTensors& tensors, double strength);
uint64_t load_adapters(
    const CacheTensors& tensors, const std::vector<AdapterShare>& shares, std::optional<double> program_scale);
/// An adapter that is open, and how much of it.
struct OpenShare {
  std::shared_ptr<const Adapter> adapter;
  double strength = 1;
};
uint64_t load_adapters(
    const CacheTensors& tensors, const std::vector<OpenShare>& shares, std::optional<double> program_scale);
uint64_t set_adapter_strengths(const CacheTensors& tensors, const std::vector<double>& strengths);

} // namespace blobstore::internal
