// The new bytes of a commit, as followers see them before anything changes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <blobstore/commit_follower.h>

#include "cache/placed_blobs.h"

namespace blobstore::internal {

/// New bytes that the caller gave.
class StagedUpdate final : public StagedCommit {
 public:
  /// @param slots of the changes, in their order.
  StagedUpdate(
      const BlobCache& owner, uint64_t version, const std::vector<Slot*>& slots, const std::vector<Change>& changes)
      : owner_(owner), version_(version) {
    bytes_.reserve(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      bytes_.emplace_back(slots[i], static_cast<const uint8_t*>(changes[i].data));
    }
    std::sort(bytes_.begin(), bytes_.end());
  }
  const BlobCache& owner() const override { return owner_; }
  uint64_t version() const override { return version_; }
  bool changes(const Blob& blob) const override {
    const auto found = place_of(blob);
    return found != bytes_.end() && found->first == &blob;
  }
  const uint8_t* bytes(const Blob& blob) const override { return place_of(blob)->second; }

 private:
  using Bytes = std::vector<std::pair<const Blob*, const uint8_t*>>;

  Bytes::const_iterator place_of(const Blob& blob) const {
    return std::lower_bound(bytes_.begin(), bytes_.end(), Bytes::value_type{&blob, nullptr});
  }

  const BlobCache& owner_;
  uint64_t version_;
  Bytes bytes_; // in the order of addresses: all delegates ask for all of their constants
};

/// The bytes of the files, mapped on first request.
class StagedRevert final : public StagedCommit {
 public:
  /// @param slots in the order of addresses. @throws Error FileAccess: a file was truncated.
  StagedRevert(const BlobCache& owner, const PlacedBlobs& blobs, uint64_t version, const std::vector<Slot*>& slots)
      : owner_(owner), blobs_(blobs), version_(version), slots_(slots.begin(), slots.end()) {
    for (const Slot* slot : slots) {
      blobs.check_length(*slot);
    }
  }
  const BlobCache& owner() const override { return owner_; }
  uint64_t version() const override { return version_; }
  bool changes(const Blob& blob) const override { return std::binary_search(slots_.begin(), slots_.end(), &blob); }
  bool restores_file() const override { return true; }
  const uint8_t* bytes(const Blob& blob) const override {
    const auto& slot = static_cast<const Slot&>(blob);
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
  std::vector<const Blob*> slots_; // in the order of addresses
  mutable std::unordered_map<const Slot*, Mapping> maps_;
};

} // namespace blobstore::internal
