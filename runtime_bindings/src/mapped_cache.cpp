// The cache over mapped files; what its parts guarantee is said in cache.h.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include <blobstore/cache.h>

#include "digest.h"
#include "fair_lock.h"
#include "file.h"
#include "file_pages.h"
#include "followers.h"
#include "fork.h"
#include "memory_usage.h"
#include "ptd_reader.h"
#include "text_hash.h"
#include "working_copy.h"

namespace blobstore {
namespace {

/// A file and the memory that holds it.
struct Source {
  std::string path;
  File file; // of a private mode: where the clean bytes are
  uint64_t size = 0; // of the file, when it was opened
  Mapping map;
  PtdTable table;
};

/// A blob and what a commit has to know about it.
struct Slot : Blob {
  size_t source = 0;
  uint32_t segment = 0;
  uint64_t entry = 0; // its number in the file
  bool first_of_segment = true; // keys that share their bytes with it come later
  std::optional<FilePages> pages; // if it lies in a private map of the file
  bool dirty = false;
  std::vector<uint8_t> original; // of a dirty blob in memory that is no map of a file
  std::atomic<uint64_t> version{0};
};

class MappedCache final : public BlobCache, private ForkAware {
 public:
  MappedCache(const std::vector<std::string>& paths, Mode mode, std::string name, std::shared_ptr<BlobCache> base)
      : BlobCache(mode, std::move(name), std::move(base)) {
    sources_.reserve(paths.size());
    for (const std::string& path : paths) {
      open_source(path);
    }
    add_base_keys();
    enter();
  }

  ~MappedCache() override { leave(); }

  const Blob* find(std::string_view key) const override {
    lookups_.fetch_add(1, std::memory_order_relaxed);
    const auto found = index_.find(key);
    if (found != index_.end()) {
      return found->second;
    }
    const Blob* blob = base() ? base()->find(key) : nullptr;
    if (blob == nullptr) {
      misses_.fetch_add(1, std::memory_order_relaxed);
    }
    return blob;
  }

  size_t size() const override { return slots_.size() + of_base_.size(); }

  const Blob& blob(size_t index) const override {
    return index < slots_.size() ? *slots_[index] : *of_base_[index - slots_.size()];
  }

  bool owns(std::string_view key) const override { return index_.count(key) != 0; }

  uint64_t generation() const override {
    const uint64_t mine = working_copy_ ? working_copy_->generation() : generation_.load(std::memory_order_acquire);
    return mine + (base() ? base()->generation() : 0);
  }

  uint64_t version(std::string_view key) const override {
    const auto found = index_.find(key);
    if (found == index_.end()) {
      if (base() && base()->find(key)) {
        return base()->version(key);
      }
      throw_missing(key);
    }
    return version_of(*found->second);
  }

  uint64_t update(const std::vector<Change>& given) override {
    check_writable();
    std::vector<std::vector<uint8_t>> copies;
    const std::vector<Change> changes = copy_own_bytes(given, copies);
    const std::vector<Slot*> slots = check(changes);
    if (slots.empty()) {
      return generation();
    }
    std::set<Slot*> touched(slots.begin(), slots.end()); // made here, as nothing may fail once bytes change
    Followers::List following; // what they give up goes when the locks are free
    const std::lock_guard<std::mutex> commit(commit_);
    if (working_copy_) {
      commit_shared(changes, slots, following);
    } else {
      std::vector<Prepared> prepared = prepare(changes, slots);
      const StagedUpdate staged(*this, generation_.load() + 1, changes);
      const std::unique_lock<FairLock> alone = lock_prepared(staged, following);
      const std::lock_guard<std::mutex> writing(writing_);
      for (size_t i = 0; i < slots.size(); ++i) {
        write(*slots[i], std::move(prepared[i]), changes[i].data);
      }
      dirty_.merge(touched);
      stamp(slots);
      Followers::apply(following);
    }
    commits_.fetch_add(1, std::memory_order_relaxed);
    return generation();
  }

  uint64_t revert() override {
    check_writable();
    check_revertible();
    Followers::List following;
    const std::lock_guard<std::mutex> commit(commit_);
    const std::vector<Slot*> slots(dirty_.begin(), dirty_.end());
    if (slots.empty()) {
      return generation();
    }
    const StagedRevert staged(*this, generation_.load() + 1, slots);
    const std::unique_lock<FairLock> alone = lock_prepared(staged, following);
    const std::lock_guard<std::mutex> writing(writing_);
    for (Slot* slot : slots) {
      if (slot->pages) { // all that is dirty goes, so whole pages can
        slot->pages->restore_whole_pages();
      }
    }
    for (Slot* slot : slots) {
      restore_original(*slot);
    }
    return finish_revert(slots, following);
  }

  uint64_t revert(const std::vector<std::string>& keys) override {
    check_writable();
    check_revertible();
    std::vector<Slot*> slots;
    for (const std::string& key : keys) {
      slots.push_back(&own_slot(key));
    }
    Followers::List following;
    const std::lock_guard<std::mutex> commit(commit_);
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
    slots.erase(std::remove_if(slots.begin(), slots.end(), [](Slot* slot) { return !slot->dirty; }), slots.end());
    if (slots.empty()) {
      return generation();
    }
    const StagedRevert staged(*this, generation_.load() + 1, slots);
    // a page at either end may hold a part of another blob that stays changed: there, single bytes are put back
    std::vector<FilePages::Edges> edges(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i]->pages) {
        edges[i] = slots[i]->pages->read_edges();
      }
    }
    const std::unique_lock<FairLock> alone = lock_prepared(staged, following);
    const std::lock_guard<std::mutex> writing(writing_);
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i]->pages) {
        slots[i]->pages->restore(edges[i]);
      }
    }
    for (Slot* slot : slots) {
      restore_original(*slot);
    }
    return finish_revert(slots, following);
  }

  void follow(std::weak_ptr<CommitFollower> follower) const override { followers_.add(std::move(follower)); }

  std::vector<std::string> dirty() const override {
    check_open();
    std::vector<std::string> keys;
    const Reading reading(*this); // not commit_: a commit holds that while it waits for readers, maybe this thread
    for (const auto& slot : slots_) {
      if (working_copy_ ? version_of(*slot) != 0 : slot->dirty) {
        keys.push_back(slot->key);
      }
    }
    return keys;
  }

  CacheStats stats() const override {
    check_open();
    CacheStats stats;
    stats.keys = size();
    std::vector<MemoryRange> ranges;
    for (const Source& source : sources_) {
      ranges.push_back({source.map.pages(), source.map.length()});
    }
    for (const Mapping& map : own_maps_) {
      ranges.push_back({map.pages(), map.length()});
    }
    for (const MemoryRange& range : ranges) {
      stats.mapped_bytes += range.length;
    }
    if (const auto usage = memory_usage(ranges)) {
      stats.resident_bytes = usage->resident;
      stats.private_bytes = usage->own;
    }
    {
      const Reading reading(*this);
      for (const auto& slot : slots_) {
        if (working_copy_ ? version_of(*slot) != 0 : slot->dirty) {
          ++stats.dirty_keys;
          stats.dirty_bytes += slot->size;
        }
      }
    }
    stats.lookups = lookups_.load(std::memory_order_relaxed);
    stats.misses = misses_.load(std::memory_order_relaxed);
    stats.commits = commits_.load(std::memory_order_relaxed);
    stats.reverts = reverts_.load(std::memory_order_relaxed);
    return stats;
  }

  std::optional<std::string> recorded_digest(std::string_view key) const override {
    check_open();
    const auto found = index_.find(key);
    if (found == index_.end()) {
      return base() ? base()->recorded_digest(key) : std::nullopt;
    }
    const Slot& slot = *found->second;
    const Source& source = sources_[slot.source];
    if (!source.table.manifest || version_of(slot) != 0) {
      return std::nullopt;
    }
    const Digest& digest = source.table.segments[slot.segment].digest;
    return std::string(digest.begin(), digest.end());
  }

  void check_files() const override {
    check_open();
    if (mode() == Mode::Copy) {
      return;
    }
    for (const Source& source : sources_) {
      source.file.check_length(source.size);
    }
  }

  bool verify() const override {
    check_files();
    const Reading reading(*this);
    bool all = true;
    for (const Source& source : sources_) {
      if (!source.table.manifest) {
        all = false;
        continue;
      }
      PtdTable table = source.table;
      if (working_copy_) { // commits keep the manifest up to date
        table = read_ptd(source.path, source.map.data(), source.size);
      }
      for (const auto& slot : slots_) {
        if (&sources_[slot->source] == &source && slot->dirty && slot->first_of_segment) {
          table.segments[slot->segment].digest = digest(
              source.map.data() + table.segments[slot->segment].start, table.segments[slot->segment].size);
        }
      }
      verify_ptd(source.path, source.map.data(), table);
    }
    return all && (!base() || base()->verify());
  }

  bool holds(const void* data, size_t size) const override {
    const auto from = reinterpret_cast<uintptr_t>(data);
    const auto overlaps = [&](const Mapping& map) {
      const auto pages = reinterpret_cast<uintptr_t>(map.pages());
      return from < pages + map.length() && pages < from + size;
    };
    return std::any_of(sources_.begin(), sources_.end(), [&](const Source& source) { return overlaps(source.map); }) ||
        std::any_of(own_maps_.begin(), own_maps_.end(), overlaps) || (base() && base()->holds(data, size));
  }

  void close() override { closed_.store(true, std::memory_order_release); }
  bool closed() const override { return closed_.load(std::memory_order_acquire); }

 private:
  // Opening.

  void open_source(const std::string& path) {
    Source source;
    source.path = path;
    File file(path, mode() == Mode::Shared);
    if (file.size() == 0) {
      throw Error(ErrorKind::InvalidFile, path, "the file is empty");
    }
    if (mode() == Mode::Shared) {
      working_copy_ = std::make_unique<WorkingCopy>(std::move(file));
      working_copy_->open([&](const File& open) {
        const uint64_t size = open.size();
        source.map = Mapping(open, 0, size, Mapping::Kind::Shared);
        source.table = read_ptd(path, source.map.data(), size);
        source.file = open.reopen();
        source.size = size;
        return source.table.entries.size();
      });
    } else {
      const uint64_t size = file.size();
      if (mode() == Mode::Private) {
        source.map = Mapping(file, 0, size, Mapping::Kind::Private);
      } else {
        source.map = Mapping(size);
        file.read(source.map.data(), size, 0);
      }
      source.table = read_ptd(path, source.map.data(), size);
      source.file = std::move(file);
      source.size = size;
    }
    sources_.push_back(std::move(source));
    add_keys(sources_.size() - 1);
  }

  void add_keys(size_t number) {
    const Source& source = sources_[number];
    index_.reserve(index_.size() + source.table.entries.size());
    std::vector<bool> taken(source.table.segments.size(), false);
    copied_ = 0;
    for (size_t i = 0; i < source.table.entries.size(); ++i) {
      const PtdEntry& entry = source.table.entries[i];
      const PtdSegment& segment = source.table.segments[entry.segment];
      if (const auto known = index_.find(entry.key); known != index_.end()) {
        check_same(*known->second, entry, source.map.data() + segment.start, segment.size, source.path);
        continue;
      }
      auto slot = std::make_unique<Slot>();
      slot->key = entry.key;
      slot->layout = entry.layout;
      slot->size = segment.size;
      slot->alignment = entry.alignment;
      slot->source = number;
      slot->segment = entry.segment;
      slot->entry = i;
      place(*slot, source, segment, taken[entry.segment]);
      taken[entry.segment] = true;
      index_.emplace(slot->key, slot.get());
      slots_.push_back(std::move(slot));
    }
  }

  /// Give a blob its address: the first key of a segment lies in the map of the file, every other one elsewhere.
  void place(Slot& slot, const Source& source, const PtdSegment& segment, bool taken) {
    slot.first_of_segment = !taken;
    shares_segments_ = shares_segments_ || taken;
    const bool maps_file = mode() == Mode::Shared || (mode() == Mode::Private && slot.size >= page_size());
    if (!taken) {
      slot.data = source.map.data() + segment.start;
    } else if (maps_file) {
      const auto kind = mode() == Mode::Shared ? Mapping::Kind::Shared : Mapping::Kind::Private;
      own_maps_.emplace_back(source.file, segment.start, slot.size, kind);
      slot.data = own_maps_.back().data();
    } else { // a copy is smaller than a page of its own
      check_copies(copied_ += slot.size, source);
      slot.data = take_memory(slot.size, slot.alignment);
      std::memcpy(slot.data, source.map.data() + segment.start, slot.size);
    }
    if (mode() == Mode::Private && (!taken || maps_file)) {
      slot.pages.emplace(slot.data, slot.size, source.file, segment.start);
    }
  }

  /// A small file in which very many keys share their bytes must not fill the memory.
  void check_copies(uint64_t size, const Source& source) const {
    constexpr uint64_t kAlways = uint64_t{192} << 20;
    constexpr uint64_t kTimesTheFile = 64;
    if (size > kAlways && (size - kAlways) / kTimesTheFile > source.map.length()) {
      throw Error(
          ErrorKind::InvalidFile,
          source.path,
          "so many keys share their bytes that copies for each of them would take more than " + std::to_string(size) +
              " bytes; the file has " + std::to_string(source.map.length()));
    }
  }

  /// Memory for small copies, many to a page.
  uint8_t* take_memory(size_t size, size_t alignment) {
    alignment = std::min(std::max<size_t>(alignment, 128), page_size());
    spare_used_ = align_up(spare_used_, alignment);
    if (spare_ == nullptr || spare_used_ + std::max<size_t>(size, 1) > spare_size_) {
      spare_size_ = std::max<size_t>(size, size_t{1} << 18);
      own_maps_.emplace_back(spare_size_);
      spare_ = own_maps_.back().data();
      spare_used_ = 0;
    }
    uint8_t* memory = spare_ + spare_used_;
    spare_used_ += std::max<size_t>(size, 1);
    return memory;
  }

  void check_same(const Slot& known, const PtdEntry& entry, const uint8_t* data, size_t size, const std::string& path)
      const {
    const std::string& other = sources_[known.source].path;
    if (known.layout != entry.layout) {
      throw Error(
          ErrorKind::KeyConflict,
          "key '" + entry.key + "' is " + to_string(known.layout) + " in " + other + " but " + to_string(entry.layout) +
              " in " + path);
    }
    if (known.size != size || std::memcmp(known.data, data, size) != 0) {
      throw Error(ErrorKind::KeyConflict, "key '" + entry.key + "' has different bytes in " + other + " and in " + path);
    }
  }

  void add_base_keys() {
    if (!base()) {
      return;
    }
    for (size_t i = 0; i < base()->size(); ++i) {
      const Blob& blob = base()->blob(i);
      if (index_.count(blob.key) == 0) {
        of_base_.push_back(&blob);
      }
    }
  }

  // Changing.

  void check_writable() const {
    check_open();
    if (held_by_this_thread()) {
      throw Error(ErrorKind::Unsupported, name(), "this thread is reading the cache, so it cannot change it now");
    }
  }

  void check_revertible() const {
    if (working_copy_) {
      throw Error(
          ErrorKind::Unsupported,
          name(),
          "a shared working copy has no older bytes to go back to; load the file that it was made from");
    }
  }

  Slot& own_slot(const std::string& key) const {
    const auto found = index_.find(key);
    if (found == index_.end()) {
      if (base() && base()->find(key)) {
        throw Error(
            ErrorKind::KeyNotFound,
            name(),
            "key '" + key + "' belongs to the base " + base()->name() + "; change it there");
      }
      at(key); // throws
    }
    return *found->second;
  }

  /// New bytes that are bytes of this very cache or its base, such as a view, would change while they are read.
  std::vector<Change> copy_own_bytes(const std::vector<Change>& given, std::vector<std::vector<uint8_t>>& copies)
      const {
    std::vector<Change> changes = given;
    std::optional<Reading> reading; // all of one generation
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

  std::vector<Slot*> check(const std::vector<Change>& changes) const {
    std::vector<Slot*> slots;
    std::unordered_set<const Slot*> seen;
    for (const Change& change : changes) {
      Slot& slot = own_slot(change.key);
      if (change.layout != nullptr && *change.layout != slot.layout) {
        throw Error(
            ErrorKind::Layout,
            name(),
            "key '" + change.key + "' is " + to_string(slot.layout) + ", the new data is " + to_string(*change.layout));
      }
      if (change.size != slot.size) {
        throw Error(
            ErrorKind::Layout,
            name(),
            "key '" + change.key + "' has " + std::to_string(slot.size) + " bytes, the new data has " +
                std::to_string(change.size));
      }
      if (!seen.insert(&slot).second) {
        throw Error(ErrorKind::KeyConflict, name(), "key '" + change.key + "' is there twice in one commit");
      }
      slots.push_back(&slot);
    }
    if (working_copy_) {
      check_unshared(changes, slots, seen);
    }
    return slots;
  }

  /// In a working copy, keys that share a segment can only change together.
  void check_unshared(
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
    if (!shares_segments_) {
      return;
    }
    for (const auto& slot : slots_) {
      const auto found = by_segment.find(slot->segment);
      if (found != by_segment.end() && seen.count(slot.get()) == 0) {
        throw_shared(*slot, found->second->key);
      }
    }
  }

  [[noreturn]] void throw_shared(const Slot& slot, const std::string& other) const {
    throw Error(
        ErrorKind::Unsupported,
        name(),
        "keys '" + slot.key + "' and '" + other +
            "' share their bytes in this file, so they cannot differ; make a working copy in which they do not");
  }

  /// What a commit needs besides the new bytes. It is not put into the slots before the commit has begun, so that
  /// a fork finds them whole.
  struct Prepared {
    FilePages::Prepared pages;
    std::vector<uint8_t> original;
  };

  /// New bytes that the caller gave.
  class StagedUpdate final : public StagedCommit {
   public:
    StagedUpdate(const BlobCache& owner, uint64_t version, const std::vector<Change>& changes)
        : owner_(owner), version_(version) {
      bytes_.reserve(changes.size());
      for (const Change& change : changes) {
        bytes_.emplace(change.key, static_cast<const uint8_t*>(change.data));
      }
    }
    const BlobCache& owner() const override { return owner_; }
    uint64_t version() const override { return version_; }
    bool changes(std::string_view key) const override { return bytes_.count(key) != 0; }
    const uint8_t* bytes(std::string_view key) const override { return bytes_.at(key); }

   private:
    const BlobCache& owner_;
    uint64_t version_;
    TextMap<const uint8_t*> bytes_;
  };

  /// The bytes of the files; mapped on first request. @throws Error FileAccess: a file was truncated.
  class StagedRevert final : public StagedCommit {
   public:
    StagedRevert(const MappedCache& owner, uint64_t version, const std::vector<Slot*>& slots)
        : owner_(owner), version_(version) {
      slots_.reserve(slots.size());
      for (const Slot* slot : slots) {
        if (slot->pages) { // else the bytes are in memory
          const Source& source = owner.sources_[slot->source];
          source.file.check_length(source.table.segments[slot->segment].start + slot->size);
        }
        slots_.emplace(slot->key, slot);
      }
    }
    const BlobCache& owner() const override { return owner_; }
    uint64_t version() const override { return version_; }
    bool changes(std::string_view key) const override { return slots_.count(key) != 0; }
    const uint8_t* bytes(std::string_view key) const override {
      const Slot& slot = *slots_.at(key);
      if (!slot.pages || slot.size == 0) {
        return slot.original.data();
      }
      const auto [map, fresh] = maps_.try_emplace(&slot);
      if (fresh) {
        const Source& source = owner_.sources_[slot.source];
        const uint64_t start = source.table.segments[slot.segment].start;
        map->second = Mapping(source.file, start, slot.size, Mapping::Kind::ReadOnly);
      }
      return map->second.data();
    }

   private:
    const MappedCache& owner_;
    uint64_t version_;
    TextMap<const Slot*> slots_;
    mutable std::unordered_map<const Slot*, Mapping> maps_;
  };

  /// Have all followers prepare, then shut readers out. Whoever came in between prepares when they are out, as others
  /// might go on coming.
  std::unique_lock<FairLock> lock_prepared(const StagedCommit& staged, Followers::List& following) {
    try {
      const uint64_t seen = followers_.prepare(staged, 0, following);
      const std::unique_ptr<Reading> of_base = read_base();
      std::unique_lock<FairLock> exclusive(lock_);
      if (followers_.last() != seen) {
        const Alone alone(*this);
        followers_.prepare(staged, seen, following);
      }
      return exclusive;
    } catch (...) {
      following.clear(); // while commit_ is held
      throw;
    }
  }

  /// For who will take the exclusive lock and read the base then: in the order of readers, the base is first.
  std::unique_ptr<Reading> read_base() const { return base() ? std::make_unique<Reading>(*base()) : nullptr; }

  /// Get all memory that the commit takes, so that nothing can fail once it has begun.
  std::vector<Prepared> prepare(const std::vector<Change>& changes, const std::vector<Slot*>& slots) const {
    std::vector<Prepared> prepared(slots.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      const Slot& slot = *slots[i];
      if (slot.dirty || slot.size == 0) {
        continue;
      }
      if (slot.pages) {
        prepared[i].pages = slot.pages->prepare(changes[i].data, "the pages of '" + slot.key + "'");
      } else {
        prepared[i].original.assign(slot.data, slot.data + slot.size);
      }
    }
    return prepared;
  }

  void write(Slot& slot, Prepared&& prepared, const void* data) {
    if (slot.size != 0) {
      if (slot.pages) {
        slot.pages->write(std::move(prepared.pages), data);
      } else {
        if (!slot.dirty) {
          slot.original = std::move(prepared.original);
        }
        std::memcpy(slot.data, data, slot.size);
      }
    }
    slot.dirty = true;
  }

  /// Give what changed a new generation; under the exclusive lock.
  void stamp(const std::vector<Slot*>& slots) {
    const uint64_t generation = generation_.load(std::memory_order_relaxed) + 1;
    for (Slot* slot : slots) {
      slot->version.store(generation, std::memory_order_relaxed);
    }
    generation_.store(generation, std::memory_order_release);
  }

  uint64_t version_of(const Slot& slot) const {
    return working_copy_ ? working_copy_->version(slot.entry) : slot.version.load(std::memory_order_acquire);
  }

  /// Patches for the blobs, and for the manifest, so that the working copy always has the right digests.
  void commit_shared(
      const std::vector<Change>& changes,
      const std::vector<Slot*>& slots,
      Followers::List& following) {
    const Source& source = sources_[0];
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
    const Alone alone(*this);
    std::vector<uint8_t> manifest;
    try {
      working_copy_->commit(
          keys,
          [&] {
            source.file.check_length(source.size);
            // here no other process can commit in between, so it is certain which version this will be
            const StagedUpdate staged(*this, working_copy_->generation() + 1, changes);
            followers_.prepare(staged, 0, following);
            std::vector<Patch> patches;
            for (size_t i = 0; i < slots.size(); ++i) {
              patches.push_back({source.table.segments[slots[i]->segment].start, changes[i].data, changes[i].size});
            }
            if (const auto& place = source.table.manifest) {
              const uint8_t* now = source.map.data() + place->start;
              manifest.assign(now, now + place->size + sizeof(Digest));
              uint8_t* of_segments = manifest.data() + (place->digests - place->start);
              for (size_t i = 0; i < slots.size(); ++i) {
                std::memcpy(of_segments + sizeof(Digest) * slots[i]->segment, digests[i].data(), sizeof(Digest));
              }
              const Digest sum = digest(manifest.data(), place->size);
              std::memcpy(manifest.data() + place->size, sum.data(), sizeof sum);
              patches.push_back({place->start, manifest.data(), manifest.size()});
            }
            return patches;
          },
          [&](const Patch& patch) {
            if (patch.size != 0) {
              std::memcpy(source.map.data() + patch.offset, patch.data, patch.size);
            }
          },
          [&] { Followers::apply(following); }); // before another process commits
    } catch (...) {
      following.clear(); // while nobody can ask for the same version
      throw;
    }
  }

  // Reverting.

  static void restore_original(Slot& slot) {
    if (!slot.original.empty()) {
      std::memcpy(slot.data, slot.original.data(), slot.size);
      slot.original = {};
    }
  }

  uint64_t finish_revert(const std::vector<Slot*>& slots, const Followers::List& following) {
    for (Slot* slot : slots) {
      slot->dirty = false;
      dirty_.erase(slot);
    }
    stamp(slots);
    Followers::apply(following);
    reverts_.fetch_add(1, std::memory_order_relaxed);
    return generation();
  }

  // Reading.

  void lock_shared() const override {
    lock_.lock_shared();
    if (!working_copy_) {
      return;
    }
    try {
      std::unique_ptr<WorkingCopy::Lease> lease = working_copy_->lock_shared();
      const std::lock_guard<std::mutex> guard(leases_mutex_);
      leases_.push_back(std::move(lease));
    } catch (...) {
      lock_.unlock_shared();
      throw;
    }
  }

  void unlock_shared() const override {
    if (working_copy_) {
      std::unique_ptr<WorkingCopy::Lease> lease; // whichever: they are all alike
      {
        const std::lock_guard<std::mutex> guard(leases_mutex_);
        lease = std::move(leases_.back());
        leases_.pop_back();
      }
      working_copy_->unlock_shared(std::move(lease));
    }
    lock_.unlock_shared();
  }

  // Forking: wait while bytes change, but not for a commit that itself still waits for readers: one of them may be this
  // thread, or need what this thread holds. The child has no other thread, so nobody else holds its locks.

  void before_fork() override {
    writing_.lock();
    leases_mutex_.lock();
    followers_.before_fork();
    if (working_copy_) {
      working_copy_->before_fork();
    }
  }
  void after_fork_in_parent() override {
    if (working_copy_) {
      working_copy_->after_fork_in_parent();
    }
    followers_.after_fork_in_parent();
    leases_mutex_.unlock();
    writing_.unlock();
  }
  void after_fork_in_child() override {
    renew(commit_);
    renew(writing_);
    lock_.renew();
    renew(leases_mutex_);
    followers_.after_fork_in_child();
    leases_.clear();
    if (working_copy_) {
      working_copy_->after_fork_in_child();
    }
    if (held_by_this_thread()) { // it goes on reading
      try {
        if (working_copy_) {
          leases_.push_back(working_copy_->lock_again());
        }
        lock_.lock_shared();
      } catch (const std::exception&) { // the next Reading tries again, and can report it
        lose_reading();
      }
    }
  }

  std::vector<Source> sources_;
  bool shares_segments_ = false; // two keys have the same bytes in a file
  std::deque<Mapping> own_maps_; // for keys that share a segment with another
  uint8_t* spare_ = nullptr;
  size_t spare_used_ = 0;
  size_t spare_size_ = 0;
  uint64_t copied_ = 0; // bytes of one file that were copied there, while it is opened
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<const Blob*> of_base_;
  TextMap<Slot*> index_;

  std::mutex commit_; // one commit at a time
  mutable FairLock lock_; // the bytes of the blobs, dirty_, and the slots' dirty and original
  std::mutex writing_; // held while these change; taken last
  mutable Followers followers_;
  std::set<Slot*> dirty_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<bool> closed_{false};
  mutable std::atomic<uint64_t> lookups_{0};
  mutable std::atomic<uint64_t> misses_{0};
  std::atomic<uint64_t> commits_{0};
  std::atomic<uint64_t> reverts_{0};

  std::unique_ptr<WorkingCopy> working_copy_; // in mode shared only
  mutable std::mutex leases_mutex_;
  mutable std::vector<std::unique_ptr<WorkingCopy::Lease>> leases_;
};

} // namespace

std::shared_ptr<BlobCache> BlobCache::open(
    const std::vector<std::string>& paths,
    Mode mode,
    std::shared_ptr<BlobCache> base) {
  std::string name;
  for (const std::string& path : paths) {
    name += (name.empty() ? "" : " + ") + path;
  }
  if (base) {
    base->check_open();
    name += (name.empty() ? "over " : " over ") + base->name();
  } else if (paths.empty()) {
    name = "(no files)";
  }
  if (mode == Mode::Shared && paths.size() != 1) {
    throw Error(
        ErrorKind::Unsupported,
        name,
        "a shared cache is one working copy, not " + std::to_string(paths.size()) + " files; make one out of them");
  }
  return std::make_shared<MappedCache>(paths, mode, std::move(name), std::move(base));
}

} // namespace blobstore
