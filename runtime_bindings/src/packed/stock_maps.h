// Learning how the weights of XNNPACK's own delegates are packed, for the file of a working copy.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <blobstore/data_map.h>

#include "packed/load_plan.h"

namespace blobstore::internal {

/// Nothing is known of such a delegate but what it packs. So a method is loaded with numbers in place of weights. A map
/// is used for an entry if, applied to random numbers, it gives what XNNPACK made of them in this very entry, and,
/// applied to the weights, their packed bytes.
class StockMaps {
 public:
  /// Loads a method, by its number, and drops it.
  using Load = std::function<void(size_t, const LoadPlan&)>;

  /// @param blobs those of the working copy. @param packed where its weights are packed. @param plan with which they
  ///   are. None of the three is owned.
  StockMaps(const CacheDataMap& blobs, const ScratchFile& packed, const LoadPlan& plan, Load load);

  /// Find the maps of a method that was packed.
  /// @returns whether all of its packed weights that can change have one.
  bool learn(size_t method);
  /// Whether two methods pack a weight in different ways. ExecuTorch keeps the last one only, under the same name.
  bool ambiguous() const { return ambiguous_; }

  std::map<std::string, std::string> maps; // of entries, encoded
  PackedKeys keys; // of their weights and biases

 private:
  struct Unit;
  class Substitutes;
  class RandomBytes;

  std::vector<Unit> units_in(const std::vector<PackedEntry>& entries, std::set<std::string>& halves) const;
  std::set<std::string> packed_twice(size_t method) const;
  bool is_of_another_kind(const std::string& name, const std::string& kind);
  std::optional<StockPacked> pack(size_t method, const Substitutes& substitutes) const;
  const PackedMap* map_of(size_t method, const Unit& unit, const PackedSources& random, const uint8_t* made);

  const CacheDataMap& blobs_;
  const ScratchFile& packed_;
  const LoadPlan& plan_;
  const Load load_;
  /// By the sizes and the seed of entries, and a number. Entries of equal sizes may be packed in several ways; the last
  /// one is empty if no further way was found.
  std::map<std::string, std::optional<PackedMap>> known_;
  std::map<std::string, std::string> kinds_; // of entries with a map: their sizes and seeds
  bool ambiguous_ = false;
};

} // namespace blobstore::internal
