// Which modules of programs PEFT's names mean, and the rows of lora_b that these need: Hugging Face rotates the two
// halves of a head against each other, Llama's own code neighbouring elements, so the rows of q and k lie in another
// order there.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <blobstore/adapters.h>

#include "adapters/peft_folder.h"

namespace blobstore::internal {

/// What the modules of programs are, for PEFT's names.
struct PeftTarget {
  std::string name; // of the cache, for messages
  std::map<std::string, int64_t> rows; // the modules, and how many features each gives
  std::optional<int64_t> head_dim; // see KnownOfCache
  std::map<std::string, std::string> given; // modules of PEFT and the weights that the caller names for them
};

/// The adapter of a folder as one whose tensors have the names of programs: `<module>.lora_a.weight` and
/// `<module>.lora_b.weight`. Ranks and dtypes stay. Fused modules (`qkv_proj`, `gate_up_proj`) are split by rows where
/// the programs have their parts. The modules of `given` keep their names.
///
/// @throws Error KeyNotFound: the programs have no such module. Adapter: a name may mean several, two names mean one,
///   or the order of the rows of q and k is not known. Layout: the rows are no heads, or not those of the parts.
std::shared_ptr<const Adapter> adapter_for(const Adapter& folder, const PeftTarget& target);

} // namespace blobstore::internal
