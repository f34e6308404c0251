// Exchanging the adapter of a cache, and changing its strength, while programs run.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/adapters.h>

#include "adapters/on_cache.h"
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

/// The tensors with which programs run with adapters, each with its strength.
/// @param halves only each `lora_b`. @throws Error Update: an adapter is stored quantized. Or as `combined`.
NamedViews values_of(const CacheTensors& tensors, const KnownOfCache& known, const LoadedAdapters& loaded, bool halves);
/// The digests of the blobs that are made of the tensors of what is loaded.
std::map<std::string, Digest> digests_of_adapters(
    const CacheTensors& tensors, const KnownOfCache& known, const LoadedAdapters& loaded);

} // namespace blobstore::internal
