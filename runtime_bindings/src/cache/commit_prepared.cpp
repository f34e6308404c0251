// A commit before anything changes: it is checked, and everything that can fail is done.

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include <blobstore/packed.h>

#include "cache/mapped_cache.h"
#include "cache/thread_readings.h"
#include "os/text.h"

namespace blobstore::internal {

std::optional<uint64_t> MappedCache::update_if(const std::vector<Change>& given, const std::vector<Change>& unchanged) {
  check_writable();
  std::vector<std::vector<uint8_t>> copies;
  const std::vector<Change> changes = copy_own_bytes(given, copies);
  const std::vector<Slot*> slots = check(changes);
  if (slots.empty()) {
    return generation();
  }
  Followers::List following; // what it replaces is destroyed when the locks are free
  const std::lock_guard<std::mutex> commit(commit_);
  if (working_copy_) {
    if (packed() != nullptr) {
      copies_ = packed()->copies_of(*this); // they follow the cache as long as they live
    }
    if (!commit_to_all_processes(changes, unchanged, slots, following)) {
      return std::nullopt;
    }
  } else if (have_bytes(unchanged)) {
    commit_to_this_process(changes, slots, following);
  } else {
    return std::nullopt;
  }
  commits_.fetch_add(1, std::memory_order_relaxed);
  return generation();
}

void MappedCache::check_writable() const {
  check_open();
  if (ThreadReadings::any(*this)) {
    throw_error_in(ErrorKind::Unsupported, name(), "this thread is reading the cache, so it cannot change it now");
  }
  if (working_copy_) {
    working_copy_->check_unread();
  }
}

/// Whether blobs have these bytes; no commit happens meanwhile.
bool MappedCache::have_bytes(const std::vector<Change>& expected) const {
  return std::all_of(expected.begin(), expected.end(), [&](const Change& one) {
    const Slot* slot = blobs_.find(one.key);
    return slot == nullptr || one.size == 0 || std::memcmp(slot->data, one.data, one.size) == 0;
  });
}

/// New bytes that are bytes of this very cache or its base, such as a view, would change while they are read.
std::vector<Change> MappedCache::copy_own_bytes(
    const std::vector<Change>& given, std::vector<std::vector<uint8_t>>& copies) const {
  std::vector<Change> changes = given;
  std::optional<Reading> reading; // one for all, so that they are of one generation
  for (Change& change : changes) {
    if (holds(change.data, change.size)) {
      if (!reading) {
        reading.emplace(*this);
      }
      const auto* bytes = static_cast<const uint8_t*>(change.data);
      copies.emplace_back(bytes, bytes + change.size);
      change.data = copies.back().data();
    }
  }
  return changes;
}

std::vector<Slot*> MappedCache::check(const std::vector<Change>& changes) const {
  std::vector<Slot*> slots;
  std::unordered_set<const Slot*> seen;
  for (const Change& change : changes) {
    Slot& slot = own_slot(change.key);
    if (change.layout != nullptr && *change.layout != slot.layout) {
      throw_error_in(
          ErrorKind::Layout,
          name(),
          "key '{}' is {}, the new data is {}",
          change.key,
          to_string(slot.layout),
          to_string(*change.layout));
    }
    if (change.size != slot.size) {
      throw_error_in(
          ErrorKind::Layout, name(), "key '{}' has {} bytes, the new data has {}", change.key, slot.size, change.size);
    }
    if (!seen.insert(&slot).second) {
      throw_error_in(ErrorKind::KeyConflict, name(), "key '{}' occurs twice in one commit", change.key);
    }
    slots.push_back(&slot);
  }
  if (working_copy_) {
    check_unshared(changes, slots, seen);
  }
  return slots;
}

/// In a working copy, keys that share a segment can only change together.
void MappedCache::check_unshared(
    const std::vector<Change>& changes,
    const std::vector<Slot*>& slots,
    const std::unordered_set<const Slot*>& seen) const {
  std::unordered_map<uint32_t, const Change*> by_segment;
  for (size_t i = 0; i < slots.size(); ++i) {
    const Change*& other = by_segment[slots[i]->segment];
    if (other != nullptr && std::memcmp(other->data, changes[i].data, changes[i].size) != 0) {
      throw_shared(*slots[i], other->key);
    }
    other = &changes[i];
  }
  if (!blobs_.shares_segments()) {
    return;
  }
  for (const auto& slot : blobs_.slots()) {
    const auto found = by_segment.find(slot->segment);
    if (found != by_segment.end() && seen.count(slot.get()) == 0) {
      throw_shared(*slot, found->second->key);
    }
  }
}

void MappedCache::throw_shared(const Slot& slot, const std::string& other) const {
  throw_error_in(
      ErrorKind::Unsupported,
      name(),
      "keys '{}' and '{}' share their bytes in this file, so they cannot differ; make a working copy in which they do "
      "not",
      slot.key,
      other);
}

/// Allocate all memory that the commit takes, and see that the pages are there, so that nothing can fail once bytes
/// change.
std::vector<MappedCache::Prepared> MappedCache::prepare(
    const std::vector<Change>& changes, const std::vector<Slot*>& slots) const {
  std::vector<Prepared> prepared(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const Slot& slot = *slots[i];
    blobs_.check_length(slot);
    if (slot.dirty || slot.size == 0) {
      continue;
    }
    if (slot.pages) {
      prepared[i].pages = slot.pages->prepare(changes[i].data, format("the pages of '{}'", slot.key));
    } else {
      prepared[i].original.assign(slot.data, slot.data + slot.size);
    }
  }
  return prepared;
}

/// Let all followers prepare, then take the exclusive lock. Followers that registered meanwhile prepare under the lock,
/// because otherwise others might go on registering.
std::unique_lock<FairLock> MappedCache::prepare_followers_and_lock(
    const StagedCommit& staged, Followers::List& prepared) {
  try {
    const uint64_t seen = followers_.prepare(staged, 0, prepared);
    const std::unique_ptr<Reading> of_base = read_base();
    std::unique_lock<FairLock> exclusive(lock_);
    if (followers_.last() != seen) {
      const CountsAsReading alone(*this, *this);
      followers_.prepare(staged, seen, prepared);
    }
    return exclusive;
  } catch (...) {
    prepared.clear(); // while commit_ is held, as the next commit reuses the version
    throw;
  }
}

/// Taken before the exclusive lock by a thread that will read the base under it: readers lock the base first, too.
std::unique_ptr<BlobCache::Reading> MappedCache::read_base() const {
  return base() ? std::make_unique<Reading>(*base()) : nullptr;
}

} // namespace blobstore::internal
