// Here a commit becomes visible: to this process, or to all that share a working copy. Nothing fails once bytes change.

#include <cstring>

#include "cache/mapped_cache.h"
#include "cache/staged_commits.h"
#include "cache/thread_readings.h"
#include "format/digest.h"

namespace blobstore::internal {
namespace {

/// Thrown where nothing was prepared yet: blobs that must be unchanged have other bytes.
struct Outdated {};

/// A manifest with the digests of a commit in it, so that a working copy always records the right ones.
std::vector<uint8_t> updated_manifest(
    const Source& source, const std::vector<Slot*>& slots, const std::vector<Digest>& digests) {
  const PtdManifest& place = *source.table.manifest;
  const uint8_t* now = source.map.data() + place.start;
  std::vector<uint8_t> manifest(now, now + place.size + sizeof(Digest));
  uint8_t* of_segments = manifest.data() + (place.digests - place.start);
  for (size_t i = 0; i < slots.size(); ++i) {
    std::memcpy(of_segments + sizeof(Digest) * slots[i]->segment, digests[i].data(), sizeof(Digest));
  }
  const Digest sum = digest(manifest.data(), place.size);
  std::memcpy(manifest.data() + place.size, sum.data(), sizeof sum);
  return manifest;
}

} // namespace

void MappedCache::commit_to_this_process(
    const std::vector<Change>& changes, const std::vector<Slot*>& slots, Followers::List& following) {
  std::set<Slot*> touched(slots.begin(), slots.end());
  std::vector<Prepared> prepared = prepare(changes, slots);
  const StagedUpdate staged(*this, generation_.load() + 1, slots, changes);
  const std::unique_lock<FairLock> alone = prepare_followers_and_lock(staged, following);
  const std::lock_guard<std::mutex> writing(writing_);
  for (size_t i = 0; i < slots.size(); ++i) {
    write(*slots[i], std::move(prepared[i]), changes[i].data);
  }
  dirty_.merge(touched);
  stamp(slots);
  Followers::apply(following);
}

void MappedCache::write(Slot& slot, Prepared&& prepared, const void* data) {
  if (slot.size != 0) {
    if (slot.pages) {
      const bool streamed = packed() != nullptr; // then delegates read what is packed of it
      slot.pages->write(std::move(prepared.pages), data, streamed);
    } else {
      if (!slot.dirty) {
        slot.original = std::move(prepared.original);
      }
      std::memcpy(slot.memory, data, slot.size);
    }
  }
  slot.dirty = true;
}

/// Give what changed a new generation; under the exclusive lock.
void MappedCache::stamp(const std::vector<Slot*>& slots) {
  const uint64_t generation = generation_.load(std::memory_order_relaxed) + 1;
  for (Slot* slot : slots) {
    slot->version.store(generation, std::memory_order_relaxed);
  }
  generation_.store(generation, std::memory_order_release);
}

/// The working copy does it: `WorkingCopy::commit` writes a journal and marks it, and from then on the commit happens,
/// even if this process is killed.
bool MappedCache::commit_to_all_processes(
    const std::vector<Change>& changes,
    const std::vector<Change>& unchanged,
    const std::vector<Slot*>& slots,
    Followers::List& following) {
  const Source& source = blobs_.sources()[0];
  std::vector<uint64_t> keys;
  std::vector<Digest> digests;
  for (size_t i = 0; i < slots.size(); ++i) {
    keys.push_back(slots[i]->entry);
    if (source.table.manifest) {
      digests.push_back(digest(changes[i].data, changes[i].size));
    }
  }
  const std::unique_ptr<Reading> of_base = read_base();
  const std::lock_guard<FairLock> exclusive(lock_);
  const CountsAsReading alone(*this, *this);
  std::vector<uint8_t> manifest;
  const auto make_patches = [&] {
    source.file.check_length(source.size);
    if (!have_bytes(unchanged)) {
      throw Outdated();
    }
    // no other process can commit in between here, so it is certain which version this will be
    const StagedUpdate staged(*this, working_copy_->generation() + 1, slots, changes);
    followers_.prepare(staged, 0, following);
    std::vector<Patch> patches;
    for (size_t i = 0; i < slots.size(); ++i) {
      patches.push_back({blobs_.segment_of(*slots[i]).start, changes[i].data, changes[i].size});
    }
    if (source.table.manifest) {
      manifest = updated_manifest(source, slots, digests);
      patches.push_back({source.table.manifest->start, manifest.data(), manifest.size()});
    }
    return patches;
  };
  const auto write_patch = [&](const Patch& patch) {
    if (patch.size != 0) {
      std::memcpy(source.map.data() + patch.offset, patch.data, patch.size);
    }
  };
  const auto apply_followers = [&] { Followers::apply(following); }; // before another process commits
  try {
    working_copy_->commit(keys, make_patches, write_patch, apply_followers);
    return true;
  } catch (const Outdated&) {
    return false;
  } catch (...) {
    following.clear(); // while no other commit of this process can begin, as that reuses the version
    throw;
  }
}

} // namespace blobstore::internal
