// Several adapters as one: their ranks lie behind each other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <blobstore/adapters.h>

#include "adapters/on_cache.h"
#include "format/tensor_view.h"

namespace blobstore::internal {

/// What the programs have for a pair.
struct Room {
  LoraPair pair;
  int8_t a_type = 0;
  int8_t b_type = 0;
};

/// The rooms for adapters among tensors.
/// @param origin the file that has them, as messages name it.
/// @throws Error Adapter or Layout: a LoRA tensor has no valid pair. Adapter: another tensor is among them.
std::vector<Room> rooms_of(const std::vector<NamedTensor>& tensors, const std::string& origin);

/// Rooms for the sum of adapters: each module that one of them has, with the sum of its ranks, as
/// `<module>.lora_a.weight` and `<module>.lora_b.weight`. The dtype is theirs if they agree, else float32.
/// @throws Error Adapter: an adapter has other tensors. Layout: two adapters have different features for a module.
std::vector<Room> rooms_for(const std::vector<ScaledAdapter>& adapters);

/// The tensors that fill the rooms: `lora_a` and the factor times `lora_b` of each adapter, rounded once, and zeros
/// where no adapter has anything.
/// @param halves only each `lora_b`.
/// @param target what has the rooms, for messages.
/// @throws Error KeyNotFound: an adapter has a module without a room. Layout: a module has other features. Adapter: the
///   ranks together exceed the room; or an adapter has tensors that belong to no pair. Update: an adapter is quantized.
NamedViews combined(
    const std::vector<Room>& rooms, const std::vector<ScaledAdapter>& adapters, bool halves, const std::string& target);

/// Tensors by name that own their memory.
struct CombinedAdapter {
  double scale = 1;
  NamedViews tensors;
};

/// The sum of adapters, as a file of its own would have it.
/// @param shares at least one, unless `like` is given. @param like an adapter whose rooms and scale the result has.
CombinedAdapter combine_adapters(const std::vector<AdapterShare>& shares, const std::string* like);

/// A tensor times a factor in another dtype, rounded once.
TensorView scaled(const TensorView& tensor, double factor, int8_t target);

} // namespace blobstore::internal
