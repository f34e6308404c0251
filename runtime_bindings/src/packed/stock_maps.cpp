#include "packed/stock_maps.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <executorch/runtime/core/named_data_map.h>

#include "os/text.h"

namespace blobstore::internal {

namespace et = executorch::runtime;
using EtError = et::Error;

/// An entry, and what is packed together in it.
struct StockMaps::Unit {
  PackedEntry entry;
  const Blob* weight;
  const Blob* bias; // may be null
};

namespace {

/// Null if it is not there in the same size and for the same kernel.
const uint8_t* find_like(const StockPacked& packed, const PackedEntry& like) {
  for (const PackedEntry& entry : packed.entries) {
    if (entry.name == like.name && entry.size == like.size && entry.seed == like.seed) {
      return packed.bytes_of(entry);
    }
  }
  return nullptr;
}

} // namespace

/// Blobs, some with other bytes. Does not own these.
class StockMaps::Substitutes final : public et::NamedDataMap {
 public:
  explicit Substitutes(const CacheDataMap& blobs) : blobs_(blobs) {}

  std::map<std::string, PackedSource, std::less<>> bytes;

  et::Result<const et::TensorLayout> get_tensor_layout(std::string_view key) const override {
    return blobs_.get_tensor_layout(key);
  }
  et::Result<et::FreeableBuffer> get_data(std::string_view key) const override {
    const auto found = bytes.find(key);
    return found == bytes.end() ? blobs_.get_data(key)
                                : et::FreeableBuffer(found->second.data, found->second.size, nullptr);
  }
  EtError load_data_into(std::string_view key, void* buffer, size_t size) const override {
    return blobs_.load_data_into(key, buffer, size);
  }
  et::Result<uint32_t> get_num_keys() const override { return blobs_.get_num_keys(); }
  et::Result<const char*> get_key(uint32_t index) const override { return blobs_.get_key(index); }

 private:
  const CacheDataMap& blobs_;
};

StockMaps::StockMaps(const CacheDataMap& blobs, const ScratchFile& packed, const LoadPlan& plan, Load load)
    : blobs_(blobs), packed_(packed), plan_(plan), load_(std::move(load)) {}

/// Those that can change. The name of an entry is the key of the weight, and behind it that of the bias if there is
/// one.
/// @param halves gets the names of which only the weight or only the bias is in the working copy.
std::vector<StockMaps::Unit> StockMaps::units_in(
    const std::vector<PackedEntry>& entries, std::set<std::string>& halves) const {
  const BlobCache& cache = *blobs_.cache();
  std::vector<Unit> units;
  for (const PackedEntry& entry : entries) {
    const std::string_view name = entry.name;
    if (const Blob* weight = cache.find(name)) {
      units.push_back({entry, weight, nullptr});
      continue;
    }
    bool half = false;
    for (size_t end = 1; end < name.size(); ++end) {
      const Blob* weight = cache.find(name.substr(0, end));
      const Blob* bias = cache.find(name.substr(end));
      half = half || weight != nullptr || bias != nullptr;
      if (weight != nullptr && bias != nullptr) {
        units.push_back({entry, weight, bias});
        half = false;
        break;
      }
    }
    if (half) {
      halves.insert(entry.name);
    }
  }
  return units;
}

/// Load a method once more, which finds what it packed, but for entries that every load packs. And names whose entries
/// are new then were packed for two kernels: ExecuTorch keeps the last one only.
std::set<std::string> StockMaps::packed_twice(size_t method) const {
  const StockPacked before(packed_);
  std::set<std::string> twice = packed_again(packed_, [&] { load_(method, plan_); });
  const StockPacked after(packed_);
  const PackedIndex known(before.entries);
  for (const PackedEntry& entry : after.entries) {
    const PackedEntry* same = known.find(entry.name);
    if (same == nullptr || same->offset != entry.offset) {
      twice.insert(entry.name);
    }
  }
  return twice;
}

namespace {

PackedSource source_of(const Blob* blob) {
  return blob != nullptr ? PackedSource{blob->data, blob->size} : PackedSource();
}

} // namespace

/// Numbers in place of blobs; the same for the same blob.
class StockMaps::RandomBytes {
 public:
  PackedSource in_place_of(const Blob* blob, Substitutes& substitutes) {
    if (blob == nullptr) {
      return {};
    }
    PackedSource& bytes = substitutes.bytes[blob->key];
    if (bytes.data == nullptr) {
      numbers_.fill(memory_.emplace_back(blob->size), /*negative=*/true);
      bytes = {memory_.back().data(), blob->size};
    }
    return bytes;
  }

 private:
  TestNumbers numbers_;
  std::vector<std::vector<uint8_t>> memory_;
};

bool StockMaps::learn(size_t method) {
  const std::set<std::string> twice = packed_twice(method);
  const StockPacked packed(packed_);
  if (packed.entries.empty()) {
    return true;
  }
  std::set<std::string> halves;
  const std::vector<Unit> units = units_in(packed.entries, halves);
  RandomBytes memory;
  Substitutes substitutes(blobs_);
  std::vector<PackedSources> random;
  for (const Unit& unit : units) {
    random.push_back({memory.in_place_of(unit.weight, substitutes), memory.in_place_of(unit.bias, substitutes)});
  }
  const std::optional<StockPacked> made = pack(method, substitutes);
  if (!made) {
    return units.empty() && halves.empty();
  }
  bool all = std::none_of(made->entries.begin(), made->entries.end(), [&](const PackedEntry& entry) {
    return halves.count(entry.name) != 0;
  });
  for (size_t i = 0; i < units.size(); ++i) {
    const Unit& unit = units[i];
    const std::string& name = unit.entry.name;
    const uint8_t* bytes = find_like(*made, unit.entry);
    const std::string kind = format("{} {}", unit.entry.size, unit.entry.seed);
    if (is_of_another_kind(name, kind)) {
      all = false;
      continue;
    }
    if (bytes == nullptr || maps.count(name) != 0) {
      continue; // only of another method, or also of one
    }
    const PackedMap* map = twice.count(name) != 0 ? nullptr : map_of(method, unit, random[i], bytes);
    const PackedSources stored{source_of(unit.weight), source_of(unit.bias)};
    if (map != nullptr && map->gives(stored, packed.bytes_of(unit.entry), unit.entry.size)) {
      kinds_[name] = kind;
      maps[name] = map->encode();
      keys[name] = {unit.weight->key, unit.bias != nullptr ? unit.bias->key : std::string()};
    } else {
      all = false;
    }
  }
  return all;
}

/// Whether another method packs the same weight in another way; then it has no map.
bool StockMaps::is_of_another_kind(const std::string& name, const std::string& kind) {
  const auto before = kinds_.find(name);
  if (before == kinds_.end() || before->second == kind) {
    return false;
  }
  ambiguous_ = true;
  before->second.clear(); // that of no entry
  maps.erase(name);
  keys.erase(name);
  return true;
}

/// @returns empty if XNNPACK does not take the numbers.
std::optional<StockPacked> StockMaps::pack(size_t method, const Substitutes& substitutes) const {
  const ScratchFile scratch = plan_.store->scratch();
  LoadPlan trial;
  trial.store = plan_.store;
  trial.stock.scratch = &scratch;
  trial.trial = &substitutes;
  try {
    load_(method, trial);
  } catch (const Error&) {
    return std::nullopt;
  }
  return std::optional<StockPacked>(scratch);
}

/// @param random the sources of an entry, for which XNNPACK made the bytes `made`.
const PackedMap* StockMaps::map_of(size_t method, const Unit& unit, const PackedSources& random, const uint8_t* made) {
  if (unit.bias == unit.weight) { // they cannot be told apart
    return nullptr;
  }
  const std::vector<size_t> sizes{random[0].size, random[1].size};
  const auto pack_numbers = [&](const std::vector<std::vector<uint8_t>>& numbers) {
    Substitutes substitutes(blobs_);
    substitutes.bytes[unit.weight->key] = {numbers[0].data(), numbers[0].size()};
    if (unit.bias != nullptr) {
      substitutes.bytes[unit.bias->key] = {numbers[1].data(), numbers[1].size()};
    }
    const std::optional<StockPacked> packed = pack(method, substitutes);
    const uint8_t* bytes = packed ? find_like(*packed, unit.entry) : nullptr;
    return bytes == nullptr ? std::nullopt : std::optional(std::vector<uint8_t>(bytes, bytes + unit.entry.size));
  };
  for (size_t way = 0;; ++way) {
    const std::string name = format("{} {} {} {} {}", sizes[0], sizes[1], unit.entry.size, unit.entry.seed, way);
    auto known = known_.find(name);
    const bool learned = known == known_.end();
    if (learned) {
      known = known_.emplace(name, PackedMap::learn(sizes, pack_numbers)).first;
    }
    if (!known->second) {
      return nullptr;
    }
    if (known->second->gives(random, made, unit.entry.size)) {
      return &*known->second;
    }
    if (learned) { // what is learned is not what this load packs, so another attempt will not be either
      known->second.reset();
      return nullptr;
    }
  }
}

} // namespace blobstore::internal
