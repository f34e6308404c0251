#include <blobstore/delegate.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <unordered_set>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/named_data_map.h>
#include <executorch/runtime/platform/log.h>

#include <blobstore/commit_follower.h>
#include <blobstore/reading.h>

#include "delegate/blob_names.h"
#include "delegate/delegate_payload.h"
#include "delegate/inner_handle.h"
#include "delegate/served.h"
#include "format/digest.h"
#include "format/flatbuffer.h"
#include "os/file.h"
#include "os/fork.h"
#include "os/heap.h"

namespace blobstore {
namespace {

namespace et = executorch::runtime;
using EtError = et::Error;

constexpr char kBackendId[] = "BlobStoreBackend";
constexpr char kTableSpec[] = "blobstore.table"; // ours; the inner backend does not get it
// XNNPACK's options; other backends ignore them
constexpr char kWeightCacheOption[] = "weight_cache_enabled";
constexpr char kPackedPathOption[] = "packed_cache_path";
constexpr char kPackedSaveOption[] = "save_weight_cache_on_disk";

constexpr uint64_t kMuch = 16u << 20;

thread_local std::shared_ptr<const BlobCache> scoped_cache;
thread_local bool scope_served = false;
thread_local std::optional<DelegateFailure> last_failure;
std::atomic<uint64_t> live_delegates{0};

EtError report(EtError code, ErrorKind kind, const char* reason) noexcept {
  try {
    last_failure = {kind, reason};
  } catch (...) { // no memory to tell in
    last_failure.reset();
  }
  return code;
}

/// Do what ExecuTorch asked for. It is compiled without exceptions, so none may reach it, whoever threw it.
template <typename Work>
EtError guard(ErrorKind kind, Work work) noexcept {
  try {
    return work();
  } catch (const Failure& failure) {
    return report(failure.code, failure.kind, failure.reason.c_str());
  } catch (const Error& error) {
    return report(EtError::AccessFailed, error.kind(), error.what());
  } catch (const std::bad_alloc&) {
    return report(EtError::MemoryAllocationFailed, kind, "out of memory");
  } catch (const std::exception& error) {
    return report(EtError::Internal, kind, error.what());
  } catch (...) {
    return report(EtError::Internal, kind, "an exception of an unknown type");
  }
}

/// Which bytes a constant has: of a cache, those of one version; of a data file that cannot change, by their digest.
struct Identity {
  const BlobCache* owner = nullptr;
  uint64_t version = 0;

  bool operator==(const Identity& other) const { return owner == other.owner && version == other.version; }
};

/// A Reading, if there is a cache.
struct MaybeReading {
  explicit MaybeReading(const BlobCache* cache) {
    if (cache != nullptr) {
      reading.emplace(*cache);
    }
  }
  std::optional<BlobCache::Reading> reading;
};

/// Bytes of constants that come from ExecuTorch's data map.
struct Fixed {
  std::optional<et::FreeableBuffer> buffer;
  std::vector<uint8_t> copy; // if another key has the same address
  ConstBytes view;
  std::string digest;
};

/// Whether a backend may read some bytes where they are. XNNPACK reads them as vectors.
bool readable_in_place(const void* data, size_t size) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && has_room_behind(data, size);
}

class Delegate final : private ForkAware {
 public:
  Delegate(et::BackendInitContext& context, const et::FreeableBuffer& processed, et::ArrayRef<et::CompileSpec> specs)
      : cache_(scoped_cache), recipe_(make_recipe(context, processed, specs)) {
    if (cache_) {
      cache_->check_open();
    }
    find_constants(context.get_named_data_map());
    fixed_.shrink_to_fit();
    if (cache_ && scope_served) {
      served_.emplace(cache_, recipe_->method, processed.data(), context.get_named_data_map(), constants());
    }
    {
      const MaybeReading reading(cache_.get());
      generation_ = cache_ ? cache_->generation() : 0;
      identities_ = identify();
      inner_ = make(identities_, nullptr, context.event_tracer());
      if (cache_) { // in the same Reading, so no commit is missed; commits may use this from here on
        link_.of = std::make_shared<Link>(*this);
        for (const BlobCache* cache = cache_.get(); cache != nullptr; cache = cache->base().get()) {
          cache->follow(link_.of);
        }
      }
    }
    live_delegates.fetch_add(1, std::memory_order_relaxed);
    enter();
  }

  ~Delegate() override {
    leave();
    InnerHandle::retire(*recipe_);
    live_delegates.fetch_sub(1, std::memory_order_relaxed);
  }

  EtError execute(et::BackendExecutionContext& context, et::Span<et::EValue*> arguments) {
    const MaybeReading reading(cache_.get()); // before the lock, as in a Method, which may wait for it with a Reading
    const std::lock_guard<std::mutex> turn(mutex_);
    refresh();
    return inner_->execute(context, arguments);
  }

 private:
  struct Next;
  class Link;

  /// However this ends, also while it is made: no cache comes back to it.
  struct OwnLink {
    std::shared_ptr<Link> of; // if there is a cache
    ~OwnLink() {
      if (of) {
        of->cut();
      }
    }
  };

  /// What caches know of a delegate. It may be destroyed by a thread that holds a Reading, so it waits for nothing but
  /// its own preparation, which waits for nobody.
  class Link final : public CommitFollower, public std::enable_shared_from_this<Link> {
   public:
    explicit Link(Delegate& delegate) : cache_(delegate.cache_), delegate_(&delegate) {}

    std::unique_ptr<Prepared> prepare(const StagedCommit& commit) override {
      const BlobCache::Reading reading(*cache_); // of what does not change; before the lock, as it may wait
      const std::lock_guard<std::mutex> guard(mutex_);
      return delegate_ == nullptr ? nullptr : delegate_->prepare(commit, shared_from_this());
    }

    void apply(Next& next) noexcept;

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

  /// A handle for the bytes of a commit; after it, the one that it replaced.
  struct Next final : CommitFollower::Prepared {
    ~Next() override {
      inner.reset();
      if (freed >= kMuch) {
        give_back_freed_memory();
      }
    }
    void apply() noexcept override { link->apply(*this); }

    std::shared_ptr<Link> link;
    std::vector<Identity> identities;
    std::unique_ptr<InnerHandle> inner;
    uint64_t freed = 0;
  };

  static std::shared_ptr<const InnerRecipe> make_recipe(
      et::BackendInitContext& context,
      const et::FreeableBuffer& processed,
      et::ArrayRef<et::CompileSpec> specs) {
    auto recipe = std::make_shared<InnerRecipe>();
    const auto* start = static_cast<const uint8_t*>(processed.data());
    try {
      recipe->payload = read_delegate_payload(start, processed.size());
    } catch (const FormatError& error) {
      throw Failure{
          EtError::DelegateInvalidCompatibility,
          ErrorKind::InvalidFile,
          std::string("the payload of a BlobStoreBackend is damaged: ") + error.what()};
    }
    recipe->bytes.assign(start, start + recipe->payload.size);
    recipe->backend = et::get_backend_class(recipe->payload.inner.c_str());
    if (recipe->backend == nullptr || !recipe->backend->is_available()) {
      throw Failure{
          EtError::NotFound,
          ErrorKind::MissingBackend,
          "it runs on backend '" + recipe->payload.inner + "', which this process does not have"};
    }
    recipe->method = context.get_method_name() != nullptr ? context.get_method_name() : "";
    for (const et::CompileSpec& spec : specs) {
      if (std::strcmp(spec.key, kTableSpec) != 0) {
        recipe->specs.push_back(spec);
      }
    }
    bool told = false;
    for (const et::BackendOption& option : context.runtime_specs()) {
      const auto is = [&](const char* key) { return std::strcmp(option.key, key) == 0; };
      if (is(kPackedPathOption) || is(kPackedSaveOption)) {
        ET_LOG(Info, "%s: no effect of '%s': packed weights are not kept in a file", kBackendId, option.key);
        continue;
      }
      told = told || is(kWeightCacheOption);
      recipe->options.push_back(option);
    }
    if (!told) {
      recipe->options.push_back(make_option(kWeightCacheOption, true));
    }
    // Also where the process has a path for all: the names that weights are packed under count versions in this process,
    // and at the next launch they would stand for other weights.
    recipe->options.push_back(make_option(kPackedPathOption, std::array<char, et::kMaxOptionValueLength>{}));
    return recipe;
  }

  static et::BackendOption make_option(const char* key, et::OptionValue value) {
    et::BackendOption option{};
    std::strncpy(option.key, key, sizeof option.key - 1);
    option.value = value;
    return option;
  }

  const std::vector<DelegateConstant>& constants() const { return recipe_->payload.constants; }

  /// Where every constant is; of all of them, before anything is initialized: an inner backend that fails halfway
  /// leaves its shared cache in disorder.
  void find_constants(const et::NamedDataMap* map) {
    std::set<const void*> addresses;
    std::string missing;
    for (const DelegateConstant& constant : constants()) {
      Fixed fixed;
      const Blob* blob = cache_ ? cache_->find(constant.key) : nullptr;
      const BlobCache* owner = nullptr;
      size_t size = 0;
      if (blob != nullptr) {
        size = blob->size;
        owner = cache_.get();
        while (!owner->owns(constant.key)) {
          owner = owner->base().get();
        }
      } else if (map != nullptr) {
        auto found = map->get_data(constant.key);
        if (!found.ok()) {
          missing += (missing.empty() ? "'" : ", '") + constant.key + "'";
          continue;
        }
        size = found->size();
        fixed.view = {found->data(), size};
        if (!addresses.insert(fixed.view.data).second) { // XNNPACK takes equal addresses for equal names
          const auto* bytes = static_cast<const uint8_t*>(fixed.view.data);
          fixed.copy.assign(bytes, bytes + size);
          fixed.view.data = fixed.copy.data();
        }
        const Digest address = digest(fixed.view.data, size);
        fixed.digest.assign(address.begin(), address.end());
        fixed.buffer.emplace(std::move(found.get()));
      } else {
        missing += (missing.empty() ? "'" : ", '") + constant.key + "'";
        continue;
      }
      if (size != constant.nbytes) {
        throw Failure{
            EtError::InvalidExternalData,
            ErrorKind::Layout,
            "blob '" + constant.key + "' has " + std::to_string(size) + " bytes, the delegate takes " +
                std::to_string(constant.nbytes) + "; is the data file that of another program?"};
      }
      blobs_.push_back(blob);
      owners_.push_back(owner);
      fixed_.push_back(std::move(fixed));
    }
    if (!missing.empty()) {
      throw Failure{
          EtError::NotFound,
          ErrorKind::KeyNotFound,
          "it takes blobs that are in no data file" + (cache_ ? " of " + cache_->name() : std::string()) + ": " +
              missing};
    }
  }

  std::vector<Identity> identify() const {
    std::vector<Identity> identities(blobs_.size());
    for (size_t i = 0; i < blobs_.size(); ++i) {
      if (owners_[i] != nullptr) {
        identities[i] = {owners_[i], owners_[i]->version(constants()[i].key)};
      }
    }
    return identities;
  }

  bool changes(const StagedCommit& commit, size_t i) const {
    return owners_[i] == &commit.owner() && commit.changes(constants()[i].key);
  }

  /// A handle for what will hold after a commit, beside the one that runs.
  std::unique_ptr<CommitFollower::Prepared> prepare(const StagedCommit& commit, std::shared_ptr<Link> link) const {
    std::vector<size_t> changed;
    for (size_t i = 0; i < blobs_.size(); ++i) {
      if (changes(commit, i)) {
        changed.push_back(i);
      }
    }
    if (changed.empty()) {
      return nullptr;
    }
    std::vector<Identity> identities = identify();
    for (const size_t i : changed) {
      identities[i].version = commit.version();
    }
    try {
      auto next = std::make_unique<Next>();
      next->link = std::move(link);
      next->inner = make(identities, &commit, nullptr);
      next->identities = std::move(identities);
      return next;
    } catch (const Failure& failure) {
      throw Error(
          failure.kind,
          commit.owner().name(),
          "nothing was changed, because " +
              (recipe_->method.empty() ? std::string("a delegate") : "a delegate of method '" + recipe_->method + "'") +
              " cannot take the new weights: " + failure.reason,
          static_cast<int>(failure.code));
    }
  }

  /// The commit has happened, and nobody runs. Where other commits came in between, the next call prepares what holds;
  /// one to the base may come at this moment.
  void apply(Next& next) noexcept {
    const uint64_t generation = cache_->generation(); // first: what comes later has a later one
    try {
      if (identify() != next.identities) {
        return;
      }
    } catch (...) { // out of memory
      return;
    }
    next.freed = changed(identities_, next.identities);
    identities_.swap(next.identities);
    inner_.swap(next.inner);
    inner_->settle_names();
    generation_ = generation;
  }

  uint64_t changed(const std::vector<Identity>& before, const std::vector<Identity>& after) const {
    uint64_t bytes = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      bytes += before[i] == after[i] ? 0 : constants()[i].nbytes;
    }
    return bytes;
  }

  /// If the cache went on without `prepare`, as when another process changed a working copy: pack what changed. On
  /// failure the old handle stays, and the next call tries again.
  void refresh() {
    if (!cache_ && !forked_) {
      return;
    }
    const uint64_t generation = cache_ ? cache_->generation() : 0;
    if (generation == generation_ && !forked_) {
      return;
    }
    std::vector<Identity> identities = identify();
    if (forked_ || identities != identities_) {
      std::unique_ptr<InnerHandle> next = make(identities, nullptr, nullptr);
      inner_.swap(next); // the old one goes last: until then what it packed is there to be shared
      next.reset();
      if (changed(identities_, identities) >= kMuch) {
        give_back_freed_memory();
      }
      identities_ = std::move(identities);
      forked_ = false;
    }
    generation_ = generation;
  }

  /// @param commit if given, what changes in it has its bytes from there.
  std::unique_ptr<InnerHandle> make(
      const std::vector<Identity>& identities,
      const StagedCommit* commit,
      et::EventTracer* tracer) const {
    std::map<uint32_t, std::string> groups;
    std::vector<std::string> own(identities.size());
    for (size_t i = 0; i < identities.size(); ++i) {
      const DelegateConstant& constant = constants()[i];
      std::string& text = own[i];
      text = constant.key;
      text += '\0';
      if (identities[i].owner != nullptr) {
        text += std::to_string(identities[i].owner->id()) + ":" + std::to_string(identities[i].version);
      } else {
        text += fixed_[i].digest + std::to_string(constant.nbytes);
      }
      text += '\0';
      groups[constant.group] += text;
    }
    std::vector<std::shared_ptr<const BlobName>> names;
    names.reserve(identities.size());
    for (size_t i = 0; i < identities.size(); ++i) {
      names.push_back(
          BlobName::of(recipe_->payload.inner + '\0' + own[i] + '\0' + groups[constants()[i].group], commit == nullptr));
    }
    std::vector<AlignedCopy> kept;
    std::vector<AlignedCopy> passing;
    const std::vector<InnerConstant> bytes = choose_bytes(commit, kept, passing);
    return std::make_unique<InnerHandle>(recipe_, std::move(names), bytes, std::move(kept), tracer);
  }

  /// Where each constant is read from. @param kept copies that the backend may go on reading; @param passing others.
  std::vector<InnerConstant> choose_bytes(
      const StagedCommit* commit,
      std::vector<AlignedCopy>& kept,
      std::vector<AlignedCopy>& passing) const {
    std::vector<InnerConstant> bytes;
    bytes.reserve(blobs_.size());
    std::unordered_set<const void*> taken; // XNNPACK takes equal addresses for equal names
    for (size_t i = 0; i < blobs_.size(); ++i) {
      bytes.push_back({blobs_[i] != nullptr ? ConstBytes{blobs_[i]->data, blobs_[i]->size} : fixed_[i].view, nullptr});
      if (commit != nullptr) {
        taken.insert(bytes.back().view.data);
      }
    }
    for (size_t i = 0; commit != nullptr && i < blobs_.size(); ++i) {
      ConstBytes& view = bytes[i].view;
      if (view.size == 0 || !changes(*commit, i)) {
        continue;
      }
      const uint8_t* staged = commit->bytes(constants()[i].key);
      if (!constants()[i].packed) {
        kept.emplace_back(staged, view.size);
        view.data = kept.back().data();
        continue;
      }
      bytes[i].afterwards = view.data;
      if (!readable_in_place(staged, view.size) || !taken.insert(staged).second) {
        passing.emplace_back(staged, view.size);
        staged = passing.back().data();
      }
      view.data = staged;
    }
    return bytes;
  }

  void before_fork() override { mutex_.lock(); } // until a call that runs has ended
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override {
    renew(mutex_);
    if (link_.of) {
      link_.of->after_fork_in_child();
    }
    forked_ = true; // the inner backend's threads stayed in the parent; a new handle gets new ones
  }

  std::shared_ptr<const BlobCache> cache_;
  std::shared_ptr<const InnerRecipe> recipe_;
  std::vector<const Blob*> blobs_; // parallel to the constants; null: in fixed_
  std::vector<const BlobCache*> owners_; // parallel too; null likewise
  std::vector<Fixed> fixed_; // parallel too
  std::optional<Served> served_; // if ExecuTorch's own runtime loaded it on a cache
  std::mutex mutex_; // what follows, for who holds a Reading; a commit, which is alone, needs no lock
  uint64_t generation_ = 0;
  std::vector<Identity> identities_;
  std::unique_ptr<InnerHandle> inner_;
  bool forked_ = false;
  OwnLink link_; // the first to go
};

void Delegate::Link::apply(Next& next) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (delegate_ != nullptr) {
    delegate_->apply(next);
  }
}

class BlobStoreBackend final : public et::BackendInterface {
 public:
  ~BlobStoreBackend() override = default;

  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext& context,
      et::FreeableBuffer* processed,
      et::ArrayRef<et::CompileSpec> specs) const override {
    Delegate* delegate = nullptr;
    const EtError error = guard(ErrorKind::Program, [&] {
      delegate = new Delegate(context, *processed, specs);
      processed->Free();
      return EtError::Ok;
    });
    if (error != EtError::Ok) {
      return error;
    }
    return static_cast<et::DelegateHandle*>(delegate);
  }

  EtError execute(
      et::BackendExecutionContext& context,
      et::DelegateHandle* handle,
      et::Span<et::EValue*> arguments) const override {
    return guard(ErrorKind::Execution, [&] { return static_cast<Delegate*>(handle)->execute(context, arguments); });
  }

  void destroy(et::DelegateHandle* handle) const override { delete static_cast<Delegate*>(handle); }
};

} // namespace

void register_delegate() {
  static const bool done = [] {
    InnerHandle::watch_forks();
    static auto* backend = new BlobStoreBackend;
    (void)et::register_backend({kBackendId, backend});
    return true;
  }();
  (void)done;
}

CacheScope::CacheScope(std::shared_ptr<const BlobCache> cache, bool served)
    : before_(std::move(scoped_cache)), served_before_(scope_served) {
  scoped_cache = std::move(cache);
  scope_served = served;
}

CacheScope::~CacheScope() {
  scoped_cache = std::move(before_);
  scope_served = served_before_;
}

std::optional<DelegateFailure> take_delegate_failure() {
  std::optional<DelegateFailure> failure;
  std::swap(failure, last_failure);
  return failure;
}

DelegateStats delegate_stats() {
  DelegateStats stats;
  stats.handles = live_delegates.load(std::memory_order_relaxed);
  stats.inits = InnerHandle::count();
  stats.names = BlobName::count();
  return stats;
}

} // namespace blobstore
