// The bytes of the files come back: a commit whose new bytes are the old ones.

#include <algorithm>
#include <cstring>

#include "cache/mapped_cache.h"
#include "cache/staged_commits.h"
#include "os/text.h"

namespace blobstore::internal {

uint64_t MappedCache::revert() {
  check_writable();
  check_revertible();
  Followers::List following;
  const std::lock_guard<std::mutex> commit(commit_);
  const std::vector<Slot*> slots(dirty_.begin(), dirty_.end());
  if (slots.empty()) {
    return generation();
  }
  const StagedRevert staged(*this, blobs_, generation_.load() + 1, slots);
  const std::unique_lock<FairLock> alone = prepare_followers_and_lock(staged, following);
  const std::lock_guard<std::mutex> writing(writing_);
  for (Slot* slot : slots) {
    if (slot->pages) { // everything dirty is reverted, so whole pages can go
      slot->pages->restore_whole_pages();
    }
  }
  return finish_revert(slots, following);
}

uint64_t MappedCache::revert(const std::vector<std::string>& keys) {
  check_writable();
  check_revertible();
  std::set<Slot*> named;
  for (const std::string& key : keys) {
    named.insert(&own_slot(key));
  }
  Followers::List following;
  const std::lock_guard<std::mutex> commit(commit_);
  std::vector<Slot*> slots;
  std::copy_if(named.begin(), named.end(), std::back_inserter(slots), [](const Slot* slot) { return slot->dirty; });
  if (slots.empty()) {
    return generation();
  }
  const StagedRevert staged(*this, blobs_, generation_.load() + 1, slots);
  // a page at either end may hold a part of another blob that stays changed, so single bytes are restored there
  std::vector<FilePages::Edges> edges(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i]->pages) {
      edges[i] = slots[i]->pages->read_edges();
    }
  }
  const std::unique_lock<FairLock> alone = prepare_followers_and_lock(staged, following);
  const std::lock_guard<std::mutex> writing(writing_);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i]->pages) {
      slots[i]->pages->restore(edges[i]);
    }
  }
  return finish_revert(slots, following);
}

void MappedCache::check_revertible() const {
  if (working_copy_) {
    throw_error_in(
        ErrorKind::Unsupported,
        name(),
        "a shared working copy has no older bytes to go back to; load the file that it was made from");
  }
}

/// What is in memory of its own comes back, and the revert becomes visible; under the exclusive lock.
uint64_t MappedCache::finish_revert(const std::vector<Slot*>& slots, const Followers::List& following) {
  for (Slot* slot : slots) {
    if (!slot->original.empty()) {
      std::memcpy(slot->memory, slot->original.data(), slot->size);
    }
    slot->dirty = false;
    dirty_.erase(slot);
  }
  stamp(slots);
  Followers::apply(following);
  for (Slot* slot : slots) { // followers may have read them as the bytes of this commit
    slot->original = std::vector<uint8_t>();
  }
  reverts_.fetch_add(1, std::memory_order_relaxed);
  return generation();
}

} // namespace blobstore::internal
