#include "delegate/map_learning.h"

#include <map>
#include <utility>

#include "delegate/failure.h"
#include "os/scratch_file.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// Weights that are packed in one way.
struct Kind {
  std::vector<size_t> sizes; // of the sources
  std::vector<PackedUnit> units;
  std::vector<std::shared_ptr<const BlobName>> names; // of the sources, for packing numbers
};

std::string key_of(const InnerRecipe& recipe, const PackedUnit& unit) {
  const DelegateConstant& weight = recipe.payload.constants[*unit.sources[0]];
  const Digest& all = recipe.payload.digest;
  std::string key = weight.packing.empty() ? std::string(all.begin(), all.end()) + weight.key : weight.packing;
  for (const size_t size : sizes_of(unit, recipe.payload.constants)) {
    key += format(":{}", size);
  }
  return format("{}:{}:{}", key, unit.entry->size, unit.entry->seed);
}

/// The packed bytes of a kind, out of a table whose names end as the names of its sources.
std::optional<std::vector<uint8_t>> bytes_of(const Kind& kind, const PackedTable& table, const Mapping& map) {
  const std::string& weight = kind.names[0]->text();
  const std::string& last = kind.units[0].sources[1] ? kind.names[1]->text() : weight;
  for (const PackedEntry& entry : table.entries) {
    // the last constant of several that had the same numbers gave the name
    if (entry.size == kind.units[0].entry->size && entry.seed == kind.units[0].entry->seed &&
        entry.name.find(weight) != std::string::npos && ends_with(entry.name, last)) {
      return std::vector<uint8_t>(map.data() + entry.offset, map.data() + entry.offset + entry.size);
    }
  }
  return std::nullopt;
}

/// Packs numbers for one kind after the other.
class Laboratory {
 public:
  Laboratory(
      const Packing& packing,
      std::shared_ptr<const InnerRecipe> recipe,
      const BlobNames& names,
      const std::vector<InnerConstant>& constants)
      : packing_(packing), recipe_(std::move(recipe)), names_(names), constants_(constants) {}

  /// What XNNPACK makes of a kind's numbers; empty if it does not take them.
  std::optional<std::vector<uint8_t>> pack(Kind& kind, const std::vector<std::vector<uint8_t>>& numbers) {
    const ScratchFile scratch = packing_.store->scratch();
    auto recipe = std::make_shared<InnerRecipe>(*recipe_);
    recipe->path = scratch.path();
    recipe->pages = nullptr;
    BlobNames names = names_;
    std::vector<InnerConstant> constants = constants_;
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
      handle.emplace(recipe, std::move(names), constants, std::vector<AlignedCopy>(), nullptr);
    } catch (const Failure&) { // for example, scales are positive
      return std::nullopt;
    }
    const uint64_t size = scratch.file().size();
    if (size == 0) {
      return std::nullopt;
    }
    const Mapping map(scratch.file(), 0, size, Mapping::Kind::ReadOnly);
    return bytes_of(kind, read_stock_table(scratch.path(), map.data(), size), map);
  }

 private:
  const Packing& packing_;
  std::shared_ptr<const InnerRecipe> recipe_;
  const BlobNames& names_;
  const std::vector<InnerConstant>& constants_;
};

} // namespace

void learn_maps(
    Packing& packing,
    const std::shared_ptr<const InnerRecipe>& recipe,
    const BlobNames& names,
    const std::vector<InnerConstant>& constants,
    const std::vector<size_t>& weights) {
  const File& file = packing.scratch->file();
  const uint64_t size = file.size();
  if (size == 0) {
    return;
  }
  const Mapping packed(file, 0, size, Mapping::Kind::ReadOnly);
  const PackedTable table = read_stock_table(packing.scratch->path(), packed.data(), size);
  const PackedIndex index(table.entries);
  std::map<std::string, Kind> kinds;
  for (PackedUnit& unit : units_of(recipe->payload.constants, names, weights, index)) {
    if (packing.again.count(unit.entry->name) != 0) {
      continue;
    }
    Kind& kind = kinds[key_of(*recipe, unit)];
    kind.sizes = sizes_of(unit, recipe->payload.constants);
    kind.units.push_back(std::move(unit));
  }
  Laboratory laboratory(packing, recipe, names, constants);
  for (auto& entry : kinds) {
    const std::string& key = entry.first;
    Kind& kind = entry.second;
    auto known = packing.learned.find(key);
    if (known == packing.learned.end()) {
      for (size_t i = 0; i < kind.sizes.size(); ++i) {
        kind.names.push_back(BlobName::of_content("numbers" + key + '\0' + std::to_string(i)));
      }
      std::optional<PackedMap> map =
          PackedMap::learn(kind.sizes, [&](const auto& numbers) { return laboratory.pack(kind, numbers); });
      known = packing.learned.emplace(key, std::move(map)).first;
    }
    if (!known->second) {
      continue;
    }
    const std::string encoded = known->second->encode();
    for (const PackedUnit& unit : kind.units) {
      PackedSources sources;
      for (const std::optional<size_t>& source : unit.sources) {
        const ConstBytes view = source ? constants[*source].view : ConstBytes();
        sources.push_back({static_cast<const uint8_t*>(view.data), view.size});
      }
      if (known->second->gives(sources, packed.data() + unit.entry->offset, unit.entry->size)) {
        packing.maps[unit.entry->name] = encoded;
        if (!known->second->has_scales()) { // only XNNPACK can check scales, and other processes do not ask it
          std::vector<std::string>& keys = packing.keys[unit.entry->name];
          keys.clear();
          for (const std::optional<size_t>& source : unit.sources) {
            keys.push_back(source ? recipe->payload.constants[*source].key : std::string());
          }
        }
      }
    }
  }
}

} // namespace blobstore::internal
