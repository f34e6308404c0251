#include "delegate/delegate.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include <blobstore/reading.h>

#include "delegate/map_learning.h"
#include "delegate/offers.h"
#include "os/heap.h"
#include "os/text.h"

namespace blobstore::internal {

namespace {

constexpr char kStockLoad[] = "ExecuTorch's own runtime loaded the method";
constexpr uint64_t kMuch = 16u << 20; // bytes of packed weights that are worth giving back to the system

std::atomic<uint64_t> live_delegates{0};

/// A Reading, if there is a cache.
struct MaybeReading {
  explicit MaybeReading(const BlobCache* cache) {
    if (cache != nullptr) {
      reading.emplace(*cache);
    }
  }
  std::optional<BlobCache::Reading> reading;
};

/// Whether XNNPACK takes these numbers as scales.
bool are_scales(const uint8_t* bytes, size_t size) {
  for (size_t at = 0; at + sizeof(float) <= size; at += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, bytes + at, sizeof scale);
    if (!std::isnormal(scale) || scale < 0) {
      return false;
    }
  }
  return true;
}

/// A digest of a delegate and of all weights that it packs; empty if the contents of some are unknown.
std::optional<Digest> id_of(
    const DelegatePayload& payload, const BlobNames& names, const std::vector<size_t>& weights) {
  Hasher hasher;
  hasher.update(payload.digest.data(), payload.digest.size());
  for (const size_t i : weights) {
    if (!names[i]->is_of_content()) {
      return std::nullopt;
    }
    hasher.update(names[i]->text().data(), names[i]->text().size());
  }
  return hasher.digest();
}

/// The constants of a unit.
std::vector<size_t> present(const PackedUnit& unit) {
  std::vector<size_t> found;
  for (const std::optional<size_t>& source : unit.sources) {
    if (source) {
      found.push_back(*source);
    }
  }
  return found;
}

/// Where entries lie in their file: those next to each other are one part.
void note_used(const std::vector<PackedUnit>& units, std::vector<FileRange>& used) {
  for (const PackedUnit& unit : units) {
    const uint64_t begin = unit.entry->offset;
    if (used.empty() || begin != align_up(used.back().offset + used.back().size, page_size())) {
      used.push_back({begin, 0});
    }
    used.back().size = begin + unit.entry->size - used.back().offset;
  }
}

} // namespace

/// What caches know of a delegate. It may be destroyed by a thread that holds a Reading, so it waits for nothing but
/// the delegate's own preparation, which does not wait for other threads.
class Delegate::Link final : public CommitFollower, public std::enable_shared_from_this<Link> {
 public:
  explicit Link(Delegate& delegate) : cache_(delegate.cache_), delegate_(&delegate) {}

  std::unique_ptr<Prepared> prepare(const StagedCommit& commit) override {
    const BlobCache::Reading reading(*cache_); // of the blobs that stay; before the mutex, because it may wait
    const std::lock_guard<std::mutex> guard(mutex_);
    return delegate_ == nullptr ? nullptr : delegate_->prepare(commit, shared_from_this());
  }

  void apply(Next& next) noexcept {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (delegate_ != nullptr) {
      delegate_->apply(next);
    }
  }

  void cut() {
    const std::lock_guard<std::mutex> guard(mutex_);
    delegate_ = nullptr;
  }

  void after_fork_in_child() { renew(mutex_); }

 private:
  std::shared_ptr<const BlobCache> cache_;
  std::mutex mutex_;
  Delegate* delegate_;
};

/// A handle for the bytes of a commit. After the commit it holds the handle that was replaced.
struct Delegate::Next final : CommitFollower::Prepared {
  ~Next() override {
    inner.reset();
    if (freed >= kMuch) {
      give_back_freed_memory();
    }
  }
  void apply() noexcept override { link->apply(*this); }

  std::shared_ptr<Link> link;
  uint64_t generation = 0; // of the cache before the commit
  std::vector<size_t> changed; // constants
  uint64_t version = 0; // that they get
  std::vector<Identity> identities; // of all constants, if there is a new handle
  PackedPages::Writes writes;
  std::unique_ptr<InnerHandle> inner; // null if all that changes is written in place
  uint64_t freed = 0;
};

Delegate::OwnLink::~OwnLink() {
  if (of) {
    of->cut();
  }
}

Delegate::Delegate(
    std::shared_ptr<const BlobCache> cache,
    bool served,
    const LoadScope* load,
    et::BackendInitContext& context,
    const et::FreeableBuffer& processed,
    et::ArrayRef<et::CompileSpec> specs)
    : setup_(make_setup(context, processed, specs)),
      cache_(cache ? cache : offered_for(setup_->payload.constants, context.get_named_data_map())),
      sources_(cache_, context.get_named_data_map(), setup_->payload.constants) {
  if (cache_ && (served || cache == nullptr)) {
    served_.emplace(
        cache_,
        setup_->method,
        context.get_method_name(),
        processed.data(),
        context.get_named_data_map(),
        setup_->payload.constants);
  }
  {
    const MaybeReading reading(cache_.get());
    generation_ = cache_ ? cache_->generation() : 0;
    identities_ = sources_.identify();
    PackedChoice packed = choose_packed(load);
    std::optional<HeapGrowth> growth;
    if (!packed.fallback.empty()) {
      growth.emplace();
    }
    if (packed.names) {
      inner_ = make(std::move(*packed.names), nullptr, context.event_tracer());
    } else {
      inner_ = make(identities_, nullptr, context.event_tracer());
    }
    learn(load);
    packed_store_ = packed.store;
    if (setup_->packed.changing() != nullptr && !inner_->on_file()) {
      packed.store->note_unmapped();
    } else if (kPackedStores && growth) {
      packed.store->note_fallback(packed.fallback, growth->bytes());
    } else if (kPackedStores && packed.store != nullptr) {
      packed.store->note_hit();
    }
    if (cache_) { // under the same Reading, so that no commit is missed; from here on commits may use this object
      link_.of = std::make_shared<Link>(*this);
      for (const BlobCache* each = cache_.get(); each != nullptr; each = each->base().get()) {
        each->follow(link_.of);
      }
    }
  }
  live_delegates.fetch_add(1, std::memory_order_relaxed);
  enter();
}

/// The weights of a delegate that a file can have.
struct Delegate::Packable {
  std::vector<size_t> weights; // constants
  bool changes = false; // whether the file is that of a working copy
  BlobNames names; // of all constants, as the file has them
  std::optional<Digest> id; // of the delegate with these weights; empty if the contents of some are unknown
};

/// Decide where packed weights are looked up, or packed to; under a Reading.
Delegate::PackedChoice Delegate::choose_packed(const LoadScope* load) {
  std::shared_ptr<PackedFolder> store = store_for(load);
  if (!kPackedStores || store == nullptr) {
    return {};
  }
  setup_->named_by_content = true;
  const bool building = load != nullptr && load->plan.own.scratch != nullptr;
  Packable packable;
  packable.weights = sources_.of_foundation();
  packable.changes = lowest(*cache_).mode() == BlobCache::Mode::Shared;
  packable.names = names_in_file(packable, building);
  packable.id = id_of(setup_->payload, packable.names, packable.weights);
  if (building) {
    pack_to_scratch(*load, packable);
    return {};
  }
  return look_up(load, std::move(store), std::move(packable));
}

/// Where packed weights are kept; null if this delegate packs to memory alone.
std::shared_ptr<PackedFolder> Delegate::store_for(const LoadScope* load) const {
  const bool can_be_kept =
      setup_->payload.inner == kXnnpack && setup_->own_path.empty() && !sources_.of_foundation().empty();
  if (!can_be_kept) {
    return nullptr;
  }
  if (load != nullptr) {
    return load->plan.trial == nullptr ? load->plan.store : nullptr;
  }
  return cache_ != nullptr ? std::static_pointer_cast<PackedFolder>(cache_->packed()) : nullptr;
}

/// Take packed weights from a file, as far as one has them.
Delegate::PackedChoice Delegate::look_up(
    const LoadScope* load, std::shared_ptr<PackedFolder> store, Packable packable) {
  const LoadPlan* plan = load != nullptr ? &load->plan : nullptr;
  const bool changes = packable.changes;
  std::shared_ptr<const PackedLease> file = find_file(plan, *store, changes);
  const bool covered = packable.id && file != nullptr && file->covers(*packable.id);
  const std::vector<size_t> follow = changes ? packable.weights : sources_.changed_since_file(packable.weights);
  if (plan != nullptr && plan->must_cover && packable.id && !covered && (changes || follow.empty())) {
    load->result.refused = true;
    throw Failure{EtError::NotFound, ErrorKind::Program, "its packed weights are in no file"};
  }
  setup_->packed = place_in(std::move(file), store, changes);
  use_entries(load, packable);
  const bool lost = std::any_of(follow.begin(), follow.end(), [&](size_t i) { return !sources_.written_through(i); });
  if (!packable.id || lost) {
    return {std::move(store), changes && packable.id ? kNotInCopies : kChangedBefore, std::nullopt};
  }
  std::string reason;
  if (!covered) {
    reason = plan != nullptr ? plan->own.fallback : kStockLoad;
    reason = reason.empty() ? "it is no part of a method that was packed" : reason;
  }
  // what changed since goes by the names of the file
  return {std::move(store), std::move(reason), std::move(packable.names)};
}

/// Pack for a file that is being built.
void Delegate::pack_to_scratch(const LoadScope& load, const Packable& packable) {
  if (!packable.id) {
    return;
  }
  setup_->packed.path = load.plan.own.path();
  load.result.covers.insert(*packable.id);
  for (const size_t i : packable.weights) {
    load.result.names.insert(entry_name(setup_->payload.constants[i], *packable.names[i]));
  }
}

/// The names of the constants, as a file has them: also of weights that have changed since it was opened.
BlobNames Delegate::names_in_file(const Packable& packable, bool building) {
  if (!building || packable.changes) {
    std::vector<bool> in_files(setup_->payload.constants.size());
    for (const size_t i : packable.weights) {
      in_files[i] = true;
    }
    sources_.set_written_through(std::move(in_files));
  }
  BlobNames names = sources_.names(*setup_, identities_, nullptr);
  if (!building) {
    sources_.set_written_through({});
  }
  return names;
}

/// The file that has the packed weights of the foundation; may be null.
std::shared_ptr<const PackedLease> Delegate::find_file(const LoadPlan* plan, PackedFolder& store, bool changes) const {
  if (plan != nullptr) {
    return plan->own.file;
  }
  const std::optional<Digest> runtime = packing_runtime();
  const std::optional<Digest> contents = foundation_of(*cache_);
  return runtime && contents ? store.find({*contents, *runtime, changes}) : nullptr;
}

/// How the inner backend gets a file, if there is one: so that its weights change with those of the cache.
PackedPlace Delegate::place_in(
    std::shared_ptr<const PackedLease> file, const std::shared_ptr<PackedFolder>& store, bool changes) const {
  if (file == nullptr) {
    return {};
  }
  const BlobCache& foundation = lowest(*cache_);
  if (changes) {
    std::shared_ptr<PackedCopy> copy = store->copy_of(mapped(foundation), file);
    return copy == nullptr ? PackedPlace() : PackedPlace{file, nullptr, std::move(copy), file->path()};
  }
  auto pages = PackedPages::of(foundation.shared_from_this(), store, file);
  std::string path = pages != nullptr ? pages->path() : file->path();
  return {std::move(file), std::move(pages), nullptr, std::move(path)};
}

/// Note which entries of that file the load takes, and let them follow the cache.
void Delegate::use_entries(const LoadScope* load, const Packable& packable) {
  const PackedPlace& packed = setup_->packed;
  if (packed.file == nullptr) {
    return;
  }
  const std::vector<PackedUnit> units =
      units_of(setup_->payload.constants, packable.names, packable.weights, packed.file->index());
  if (load != nullptr) {
    note_used(units, load->result.used);
  }
  if (packed.pages != nullptr || packed.copy != nullptr) {
    write_through(units);
  }
}

/// The groups of constants that need a new handle when they change: not all of what is packed together can be written
/// in place.
std::set<uint32_t> Delegate::groups_to_repack(const std::vector<PackedUnit>& units) const {
  const std::vector<DelegateConstant>& constants = setup_->payload.constants;
  const PackedLease& lease = *setup_->packed.file;
  std::set<uint32_t> groups;
  std::set<size_t> in_units;
  for (const PackedUnit& unit : units) {
    const bool follows = unit.entry->map != 0 && unit.entry->offset % page_size() == 0 &&
        lease.map_of(*unit.entry).fits(sizes_of(unit, constants), unit.entry->size);
    const std::vector<size_t> sources = present(unit);
    in_units.insert(sources.begin(), sources.end());
    if (!follows) {
      groups.insert(constants[*unit.sources[0]].group);
    }
  }
  const BlobCache& foundation = lowest(*cache_);
  for (size_t i = 0; i < constants.size(); ++i) {
    if (!constants[i].packed || in_units.count(i) == 0 || !sources_.is_of(foundation, i)) {
      groups.insert(constants[i].group);
    }
  }
  return groups;
}

/// Let the packed weights follow the cache where the file has proved maps for all that is packed together.
void Delegate::write_through(const std::vector<PackedUnit>& units) {
  const std::vector<DelegateConstant>& constants = setup_->payload.constants;
  const PackedLease& lease = *setup_->packed.file;
  const std::set<uint32_t> others = groups_to_repack(units);
  std::vector<bool> through(constants.size());
  PackedPages* const pages = setup_->packed.pages.get();
  for (const PackedUnit& unit : units) {
    if (others.count(constants[*unit.sources[0]].group) != 0) {
      continue;
    }
    for (const size_t source : present(unit)) {
      through[source] = true;
      if (pages != nullptr) {
        written_.emplace(source, unit.entry);
      }
    }
    if (lease.map_of(*unit.entry).has_scales()) {
      for (size_t i = 2; i < unit.sources.size(); ++i) {
        scales_.push_back(*unit.sources[i]);
      }
    }
    if (pages != nullptr) {
      pages->manage(*unit.entry, keys_of(unit, constants));
      setup_->writes_packed = true;
    }
  }
  sources_.set_written_through(std::move(through));
}

/// Learn how the weights were packed that are being packed for a file.
void Delegate::learn(const LoadScope* load) const {
  if (!kPackedStores || load == nullptr || load->plan.own.scratch == nullptr || setup_->packed.path.empty()) {
    return;
  }
  load->result.again.merge(packed_again(*load->plan.own.scratch, [&] { make(identities_, nullptr, nullptr); }));
  std::vector<AlignedCopy> kept;
  std::vector<AlignedCopy> passing;
  learn_maps(
      load->plan,
      load->result,
      setup_,
      sources_.names(*setup_, identities_, nullptr),
      sources_.choose_bytes(nullptr, kept, passing),
      sources_.of_foundation());
}

Delegate::~Delegate() {
  leave();
  InnerHandle::retire(*setup_);
  live_delegates.fetch_sub(1, std::memory_order_relaxed);
}

uint64_t Delegate::count() {
  return live_delegates.load(std::memory_order_relaxed);
}

EtError Delegate::execute(et::BackendExecutionContext& context, et::Span<et::EValue*> arguments) {
  const MaybeReading reading(cache_.get()); // before the mutex, as in LoadedMethod::execute
  const std::lock_guard<std::mutex> turn(mutex_);
  refresh();
  return inner_->execute(context, arguments);
}

/// The entries that are written in place when some constants change.
std::set<const PackedEntry*> Delegate::entries_of(const std::vector<size_t>& changed) const {
  std::set<const PackedEntry*> entries;
  for (const size_t i : changed) {
    const auto [first, last] = written_.equal_range(i);
    for (auto each = first; each != last; ++each) {
      entries.insert(each->second);
    }
  }
  return entries;
}

/// Make a handle for the weights after a commit, while the old one is in use.
std::unique_ptr<CommitFollower::Prepared> Delegate::prepare(
    const StagedCommit& commit, std::shared_ptr<Link> link) const {
  std::vector<size_t> changed = sources_.changed_by(commit);
  if (changed.empty()) {
    return nullptr;
  }
  const auto identify = [&] {
    std::vector<Identity> identities = sources_.identify();
    for (const size_t i : changed) {
      identities[i].version = commit.version();
    }
    return identities;
  };
  try {
    auto next = std::make_unique<Next>();
    next->link = std::move(link);
    next->generation = cache_->generation();
    next->version = commit.version();
    if (PackedPages* const pages = setup_->packed.changing()) {
      next->writes = pages->prepare(commit, entries_of(changed));
    }
    const bool asks = std::any_of(scales_.begin(), scales_.end(), [&](size_t i) {
      const DelegateConstant& scale = setup_->payload.constants[i];
      return std::count(changed.begin(), changed.end(), i) != 0 &&
          !are_scales(commit.bytes(*sources_.blob_of(i)), static_cast<size_t>(scale.nbytes));
    });
    if (asks) { // biases of integers are among them, which need not be scales
      make(identify(), &commit, nullptr); // XNNPACK says what is wrong, if anything is
    }
    if (!std::all_of(changed.begin(), changed.end(), [&](size_t i) { return sources_.written_through(i); })) {
      next->identities = identify();
      next->inner = make(next->identities, &commit, nullptr);
      if (kPackedStores && packed_store_ != nullptr) {
        packed_store_->note_repacked();
      }
    }
    next->changed = std::move(changed);
    return next;
  } catch (const Failure& failure) {
    throw Error(
        failure.kind,
        commit.owner().name(),
        format(
            "nothing was changed, because a delegate{}{}{} cannot take the new weights: {}",
            setup_->method.empty() ? "" : " of method '",
            setup_->method,
            setup_->method.empty() ? "" : "'",
            failure.reason),
        static_cast<int>(failure.code));
  }
}

/// The bytes have changed, and no call runs. If other commits came in between, the handle is not used, and the next
/// call makes another; a commit to the base may happen at this very moment.
void Delegate::apply(Next& next) noexcept {
  for (const auto& write : next.writes) {
    write->apply();
  }
  const uint64_t generation = cache_->generation(); // first, so that a commit from here on has a later one
  if (next.inner == nullptr) {
    if (generation_ == next.generation && generation == next.generation + 1) { // otherwise the next call compares
      for (const size_t i : next.changed) {
        identities_[i].version = next.version;
      }
      generation_ = generation;
    }
    return;
  }
  try {
    if (sources_.identify() != next.identities) {
      return;
    }
  } catch (...) { // out of memory
    return;
  }
  next.freed = sources_.bytes_changed(identities_, next.identities);
  inner_.swap(next.inner);
  inner_->settle_names();
  identities_.swap(next.identities);
  generation_ = generation;
}

/// Pack what changed if the cache changed without `prepare`, as when another process changed a working copy. If that
/// fails, the old handle stays, and the next call tries again.
void Delegate::refresh() {
  if (!cache_ && !forked_) {
    return;
  }
  const uint64_t generation = cache_ ? cache_->generation() : 0;
  if (generation == generation_ && !forked_) {
    return;
  }
  std::vector<Identity> identities = sources_.identify();
  if (forked_ || needs_handle(identities)) {
    std::unique_ptr<InnerHandle> next = make(identities, nullptr, nullptr);
    inner_.swap(next); // the old handle is destroyed last, so that the new one can share what it packed
    next.reset();
    if (sources_.bytes_changed(identities_, identities) >= kMuch) {
      give_back_freed_memory();
    }
    forked_ = false;
  }
  identities_ = std::move(identities);
  generation_ = generation;
}

/// Whether any constant has changed whose packed bytes are not written in place.
bool Delegate::needs_handle(const std::vector<Identity>& identities) const {
  for (size_t i = 0; i < identities.size(); ++i) {
    if (!(identities[i] == identities_[i]) && !sources_.written_through(i)) {
      return true;
    }
  }
  return false;
}

/// @param commit if not null, constants that it changes have their bytes from there.
std::unique_ptr<InnerHandle> Delegate::make(
    const std::vector<Identity>& identities, const StagedCommit* commit, et::EventTracer* tracer) const {
  return make(sources_.names(*setup_, identities, commit), commit, tracer);
}

/// @param names of the constants, with what the commit changes.
std::unique_ptr<InnerHandle> Delegate::make(
    BlobNames names, const StagedCommit* commit, et::EventTracer* tracer) const {
  std::vector<AlignedCopy> kept;
  std::vector<AlignedCopy> passing;
  const std::vector<InnerConstant> bytes = sources_.choose_bytes(commit, kept, passing);
  return std::make_unique<InnerHandle>(setup_, std::move(names), bytes, std::move(kept), tracer);
}

void Delegate::after_fork_in_child() {
  renew(mutex_);
  if (link_.of) {
    link_.of->after_fork_in_child();
  }
  forked_ = true; // the inner backend's threads stayed in the parent; a new handle gets new ones
}

} // namespace blobstore::internal
