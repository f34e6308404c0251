#include "delegate/map_learning.h"

#include <map>
#include <utility>

#include "delegate/failure.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// Weights that are packed in one way.
struct Kind {
  std::vector<size_t> sizes; // of the sources
  std::vector<PackedUnit> units;
  std::vector<std::shared_ptr<const BlobName>> names; // of the sources, for packing numbers
};

std::string key_of(const InnerSetup& setup, const PackedUnit& unit) {
  const DelegateConstant& weight = setup.payload.constants[*unit.sources[0]];
  const Digest& all = setup.payload.digest;
  std::string key = weight.packing.empty() ? std::string(all.begin(), all.end()) + weight.key : weight.packing;
  for (const size_t size : sizes_of(unit, setup.payload.constants)) {
    key += format(":{}", size);
  }
  return format("{}:{}:{}", key, unit.entry->size, unit.entry->seed);
}

/// The packed bytes of a kind, out of a file whose names end as the names of its sources.
std::optional<std::vector<uint8_t>> bytes_of(const Kind& kind, const StockPacked& packed) {
  const std::string& weight = kind.names[0]->text();
  const std::string& last = kind.units[0].sources[1] ? kind.names[1]->text() : weight;
  for (const PackedEntry& entry : packed.entries) {
    // the last constant of several that had the same numbers gave the name
    if (entry.size == kind.units[0].entry->size && entry.seed == kind.units[0].entry->seed &&
        entry.name.find(weight) != std::string::npos && ends_with(entry.name, last)) {
      return std::vector<uint8_t>(packed.bytes_of(entry), packed.bytes_of(entry) + entry.size);
    }
  }
  return std::nullopt;
}

/// The stored bytes of an entry's sources.
PackedSources bytes_of(const PackedUnit& unit, const std::vector<InnerConstant>& constants) {
  PackedSources sources;
  for (const std::optional<size_t>& source : unit.sources) {
    const ConstBytes view = source ? constants[*source].view : ConstBytes();
    sources.push_back({static_cast<const uint8_t*>(view.data), view.size});
  }
  return sources;
}

/// What XNNPACK makes of a kind's numbers; empty if it does not take them.
/// @param names and @param constants those of the delegate.
std::optional<std::vector<uint8_t>> pack(
    const PackedFolder& store,
    const InnerSetup& of_delegate,
    BlobNames names,
    std::vector<InnerConstant> constants,
    const Kind& kind,
    const std::vector<std::vector<uint8_t>>& numbers) {
  const ScratchFile scratch = store.scratch();
  auto setup = std::make_shared<InnerSetup>(of_delegate);
  setup->packed = {nullptr, nullptr, nullptr, scratch.path()};
  for (const PackedUnit& unit : kind.units) {
    for (size_t i = 0; i < unit.sources.size(); ++i) {
      if (unit.sources[i]) { // all at one address, so that XNNPACK packs them once
        names[*unit.sources[i]] = kind.names[i];
        constants[*unit.sources[i]].view = {numbers[i].data(), numbers[i].size()};
      }
    }
  }
  std::optional<InnerHandle> handle;
  try {
    handle.emplace(setup, std::move(names), constants, std::vector<AlignedCopy>(), nullptr);
  } catch (const Failure&) { // for example, scales are positive
    return std::nullopt;
  }
  return bytes_of(kind, StockPacked(scratch));
}

} // namespace

void learn_maps(
    const LoadPlan& plan,
    LoadResult& result,
    const std::shared_ptr<const InnerSetup>& setup,
    const BlobNames& names,
    const std::vector<InnerConstant>& constants,
    const std::vector<size_t>& weights) {
  const StockPacked packed(*plan.own.scratch);
  const PackedIndex index(packed.entries);
  std::map<std::string, Kind> kinds;
  for (PackedUnit& unit : units_of(setup->payload.constants, names, weights, index)) {
    if (result.again.count(unit.entry->name) == 0) {
      Kind& kind = kinds[key_of(*setup, unit)];
      kind.sizes = sizes_of(unit, setup->payload.constants);
      kind.units.push_back(std::move(unit));
    }
  }
  for (auto& [key, kind] : kinds) {
    auto known = result.learned.find(key);
    if (known == result.learned.end()) {
      for (size_t i = 0; i < kind.sizes.size(); ++i) {
        kind.names.push_back(BlobName::of_content("numbers" + key + '\0' + std::to_string(i)));
      }
      const auto pack_numbers = [&, &kind = kind](const auto& numbers) {
        return pack(*plan.store, *setup, names, constants, kind, numbers);
      };
      known = result.learned.emplace(key, PackedMap::learn(kind.sizes, pack_numbers)).first;
    }
    const std::optional<PackedMap>& map = known->second;
    if (!map) {
      continue;
    }
    const std::string encoded = map->encode();
    for (const PackedUnit& unit : kind.units) {
      if (map->gives(bytes_of(unit, constants), packed.bytes_of(*unit.entry), unit.entry->size)) {
        result.maps[unit.entry->name] = encoded;
        if (!map->has_scales()) { // only XNNPACK can check scales, and other processes do not ask it
          result.keys[unit.entry->name] = keys_of(unit, setup->payload.constants);
        }
      }
    }
  }
}

} // namespace blobstore::internal
