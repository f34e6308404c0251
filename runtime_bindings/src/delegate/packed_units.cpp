#include "delegate/packed_units.h"

#include <map>

#include "delegate/inner_handle.h"

namespace blobstore::internal {

std::vector<PackedUnit> units_of(
    const std::vector<DelegateConstant>& constants,
    const BlobNames& names,
    const std::vector<size_t>& weights,
    const PackedIndex& entries) {
  std::map<uint32_t, std::vector<size_t>> groups;
  for (const size_t i : weights) {
    groups[constants[i].group].push_back(i);
  }
  std::vector<PackedUnit> units;
  const auto add = [&](size_t weight, std::optional<size_t> bias, const PackedEntry* entry) {
    if (entry == nullptr) {
      return;
    }
    PackedUnit& unit = units.emplace_back(PackedUnit{entry, {weight, bias}});
    for (const size_t other : groups[constants[weight].group]) {
      if (other != weight && other != bias) {
        unit.sources.emplace_back(other);
      }
    }
  };
  for (const size_t weight : weights) {
    const std::string name = entry_name(constants[weight], *names[weight]);
    add(weight, std::nullopt, entries.find(name));
    for (const size_t bias : groups[constants[weight].group]) {
      if (bias != weight) {
        add(weight, bias, entries.find(name + entry_name(constants[bias], *names[bias])));
      }
    }
  }
  return units;
}

std::vector<size_t> sizes_of(const PackedUnit& unit, const std::vector<DelegateConstant>& constants) {
  std::vector<size_t> sizes;
  for (const std::optional<size_t>& source : unit.sources) {
    sizes.push_back(source ? constants[*source].nbytes : 0);
  }
  return sizes;
}

std::vector<std::string> keys_of(const PackedUnit& unit, const std::vector<DelegateConstant>& constants) {
  std::vector<std::string> keys;
  for (const std::optional<size_t>& source : unit.sources) {
    keys.push_back(source ? constants[*source].key : std::string());
  }
  return keys;
}

} // namespace blobstore::internal
