// The new bytes of a commit, as followers see them before anything changes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <blobstore/commit_follower.h>

#include "cache/placed_blobs.h"
#include "format/text_hash.h"

namespace blobstore::internal {

/// New bytes that the caller gave.
class StagedUpdate final : public StagedCommit {
 public:
  StagedUpdate(const BlobCache& owner, uint64_t version, const std::vector<Change>& changes)
      : owner_(owner), version_(version), changes_(changes) {
    bytes_.reserve(changes.size());
    for (const Change& change : changes) {
      bytes_.emplace(change.key, static_cast<const uint8_t*>(change.data));
    }
  }
  const BlobCache& owner() const override { return owner_; }
  uint64_t version() const override { return version_; }
  /// Asked for every constant of every delegate: comparing few keys is faster than hashing each of those.
  bool changes(std::string_view key) const override {
    return changes_.size() > kFew
        ? bytes_.count(key) != 0
        : std::any_of(changes_.begin(), changes_.end(), [&](const Change& one) { return one.key == key; });
  }
  const uint8_t* bytes(std::string_view key) const override { return bytes_.at(key); }

 private:
  static constexpr size_t kFew = 4;

  const BlobCache& owner_;
  uint64_t version_;
  const std::vector<Change>& changes_;
  TextMap<const uint8_t*> bytes_;
};

/// The bytes of the files, mapped on first request.
class StagedRevert final : public StagedCommit {
 public:
  /// @throws Error FileAccess: a file was truncated.
  StagedRevert(const BlobCache& owner, const PlacedBlobs& blobs, uint64_t version, const std::vector<Slot*>& slots)
      : owner_(owner), blobs_(blobs), version_(version) {
    slots_.reserve(slots.size());
    for (const Slot* slot : slots) {
      if (slot->pages) { // otherwise the bytes are in memory
        blobs.source_of(*slot).file.check_length(blobs.segment_of(*slot).start + slot->size);
      }
      slots_.emplace(slot->key, slot);
    }
  }
  const BlobCache& owner() const override { return owner_; }
  uint64_t version() const override { return version_; }
  bool changes(std::string_view key) const override { return slots_.count(key) != 0; }
  bool restores_file() const override { return true; }
  const uint8_t* bytes(std::string_view key) const override {
    const Slot& slot = *slots_.at(key);
    if (!slot.pages || slot.size == 0) {
      return slot.original.data();
    }
    const auto [map, fresh] = maps_.try_emplace(&slot);
    if (fresh) {
      const uint64_t start = blobs_.segment_of(slot).start;
      map->second = Mapping(blobs_.source_of(slot).file, start, slot.size, Mapping::Kind::ReadOnly);
    }
    return map->second.data();
  }

 private:
  const BlobCache& owner_;
  const PlacedBlobs& blobs_;
  uint64_t version_;
  TextMap<const Slot*> slots_;
  mutable std::unordered_map<const Slot*, Mapping> maps_;
};

} // namespace blobstore::internal
