#include "packed/packed_copy.h"

#include <cstring>

#include "os/crash_point.h"
#include "os/fence.h"
#include "os/text.h"

namespace blobstore::internal {
PackedCopy::PackedCopy(
    const MappedCache& cache, std::shared_ptr<const PackedLease> lease, std::shared_ptr<std::atomic<uint64_t>> written)
    : cache_(cache), lease_(std::move(lease)), written_(std::move(written)) {
  const std::string& path = lease_->path();
  const PackedEntry* of_keys = lease_->index().find(kPackedKeys);
  const PackedEntry* of_state = lease_->index().find(kPackedState);
  if (of_keys == nullptr || of_state == nullptr || of_state->offset % alignof(State) != 0) {
    throw_not_packed(path, "it does not belong to a working copy");
  }
  map_ = Mapping(lease_->file().reopen_to_write(), 0, lease_->size(), Mapping::Kind::Shared);
  const PackedKeys keys = decode_keys(path, map_.data() + of_keys->offset, of_keys->size);
  if (of_state->size != state_size(keys)) {
    throw_not_packed(path, "its state does not fit");
  }
  state_ = reinterpret_cast<State*>(map_.data() + of_state->offset);
  static_assert(sizeof(State) == kStateHead);
  auto* digests = reinterpret_cast<Digest*>(state_ + 1);
  for (const auto& [name, of_entry] : keys) {
    add(name, of_entry, digests);
    digests += digests_of(of_entry);
  }
}

/// @param keys of what the entry is made of. @param digests where the file has those of the entry.
void PackedCopy::add(const std::string& name, const std::vector<std::string>& keys, Digest* digests) {
  const std::string& path = lease_->path();
  const PackedEntry* entry = lease_->index().find(name);
  if (entry == nullptr || entry->map == 0) {
    throw_not_packed(path, "one of its keys belongs to no entry");
  }
  Entry& mine = entries_.emplace_back();
  mine.map = &lease_->map_of(*entry);
  mine.packed = map_.data() + entry->offset;
  mine.size = entry->size;
  mine.digest = digests;
  mine.made_of = digests + 1;
  std::vector<size_t> sizes;
  for (const std::string& key : keys) {
    const Blob* blob = key.empty() ? nullptr : cache_.find(key);
    if (blob == nullptr && !key.empty()) {
      throw_error_in(ErrorKind::InvalidFile, path, "it takes '{}', {} does not have it", key, cache_.name());
    }
    mine.sources.push_back(blob != nullptr ? PackedSource{blob->data, blob->size} : PackedSource());
    sizes.push_back(mine.sources.back().size);
    if (blob != nullptr) {
      mine.blobs.push_back(blob);
      if (!cache_.digest_now(*blob)) {
        throw_error_in(ErrorKind::InvalidFile, cache_.name(), "the working copy records no digests");
      }
    }
  }
  if (!mine.map->fits(sizes, entry->size)) {
    throw_error_in(
        ErrorKind::InvalidFile, path, "the map of '{}' does not fit an entry of {} bytes", name, entry->size);
  }
}

struct PackedCopy::Follow final : Prepared {
  explicit Follow(std::shared_ptr<PackedCopy> to) : copy(std::move(to)) {}
  void apply() noexcept override { copy->catch_up(); }
  std::shared_ptr<PackedCopy> copy;
};

std::unique_ptr<CommitFollower::Prepared> PackedCopy::prepare(const StagedCommit&) {
  return std::make_unique<Follow>(shared_from_this());
}

bool PackedCopy::behind() const {
  return !seen_.load(std::memory_order_acquire) ||
      state_->generation.load(std::memory_order_acquire) != cache_.generation();
}

/// A process may be killed at any point: until an entry is whole, it has no digest and is made of nothing. What it is
/// made of is hashed where it was read: what the working copy records may be of other bytes, if these were damaged or
/// changed during their commit.
void PackedCopy::catch_up() noexcept {
  for (const Entry& entry : entries_) {
    bool same = true;
    for (size_t i = 0; same && i < entry.blobs.size(); ++i) {
      same = std::memcmp(&entry.made_of[i], cache_.digest_now(*entry.blobs[i]), sizeof(Digest)) == 0;
    }
    if (same) {
      continue;
    }
    std::memset(entry.digest, 0, (1 + entry.blobs.size()) * sizeof(Digest));
    full_fence();
    crash_here(CrashPoint::InPacked);
    entry.map->apply(entry.sources, entry.packed);
    for (size_t i = 0; i < entry.blobs.size(); ++i) {
      const Blob& blob = *entry.blobs[i];
      entry.made_of[i] = blobstore::internal::digest(blob.data, blob.size);
    }
    const Digest packed = blobstore::internal::digest(entry.packed, entry.size);
    full_fence();
    *entry.digest = packed;
    ++*written_;
  }
  crash_here(CrashPoint::AfterPacked);
  state_->generation.store(cache_.generation(), std::memory_order_release);
  seen_.store(true, std::memory_order_release);
}

} // namespace blobstore::internal
