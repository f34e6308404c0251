// What the names of tensors say: which belong to an adapter, which two are a pair, and which weight a pair adapts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/adapters.h>
#include <blobstore/error.h>

namespace blobstore::internal {

/// Whether a name has a part `lora_a` or `lora_b`, in upper or lower case, with dots or in the form of nodes; see
/// docs/format.md.
bool is_lora(std::string_view name);

/// The pairs among tensors, and why other tensors do not make pairs.
struct FoundPairs {
  std::vector<LoraPair> pairs; // in the order of their modules
  std::vector<Error> problems; // Adapter or Layout, for each module without a valid pair
};

/// A tensor's name and shape.
using NameAndSizes = std::pair<std::string, std::vector<int64_t>>;

/// Match the LoRA tensors with each other; others are ignored.
/// @param origin the file as messages name it.
FoundPairs find_pairs(const std::vector<NameAndSizes>& tensors, const std::string& origin);

/// The error for tensors without any LoRA tensor among them.
Error no_adapter(const std::string& origin);

/// The names that the weight of an adapted module may have: as a plain layer, or wrapped in one with an adapter.
std::vector<std::string> weight_names(const std::string& module);
/// The modules of which a tensor may be the weight, by its name.
std::vector<std::string> modules_of_weight(const std::string& name);

/// Names for a message, in alphabetical order.
std::string quoted_names(std::vector<std::string> names);

} // namespace blobstore::internal
