#include <blobstore/delegate.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <unordered_map>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/named_data_map.h>

#include "arena.h"
#include "blob_names.h"
#include "delegate_payload.h"
#include "digest.h"
#include "flatbuffer.h"

namespace blobstore {
namespace {

namespace et = executorch::runtime;
using EtError = et::Error;

constexpr char kBackendId[] = "BlobStoreBackend";
constexpr char kTableSpec[] = "blobstore.table"; // ours; the inner backend does not get it
constexpr char kWeightCacheOption[] = "weight_cache_enabled"; // XNNPACK's; other backends ignore it

constexpr uint64_t kMuch = 16u << 20;

thread_local std::shared_ptr<const BlobCache> scoped_cache;
thread_local std::optional<DelegateFailure> last_failure;
std::atomic<uint64_t> init_count{0};

/// Thrown inside the delegate; never leaves it.
struct Failure {
  EtError code;
  ErrorKind kind;
  std::string reason;
};

EtError report(const Failure& failure) {
  last_failure = {failure.kind, failure.reason};
  return failure.code;
}

/// Memory that an inner backend packs from, or goes on reading.
struct View {
  const void* data = nullptr;
  size_t size = 0;
};

/// What the inner backend finds blobs in: views of memory that stays, under names that say the version.
class PinnedMap final : public et::NamedDataMap {
 public:
  std::unordered_map<std::string, View> views;

  et::Result<const et::TensorLayout> get_tensor_layout(std::string_view) const override {
    return EtError::NotImplemented;
  }

  et::Result<et::FreeableBuffer> get_data(std::string_view key) const override {
    const auto found = views.find(std::string(key));
    if (found == views.end()) {
      return EtError::NotFound;
    }
    return et::FreeableBuffer(found->second.data, found->second.size, nullptr);
  }

  EtError load_data_into(std::string_view key, void* buffer, size_t size) const override {
    const auto found = views.find(std::string(key));
    if (found == views.end()) {
      return EtError::NotFound;
    }
    if (size != found->second.size) {
      return EtError::InvalidArgument;
    }
    std::memcpy(buffer, found->second.data, size);
    return EtError::Ok;
  }

  et::Result<uint32_t> get_num_keys() const override { return static_cast<uint32_t>(views.size()); }

  et::Result<const char*> get_key(uint32_t index) const override {
    if (index >= views.size()) {
      return EtError::InvalidArgument;
    }
    return std::next(views.begin(), index)->first.c_str();
  }
};

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

class Delegate;

/// One initialization of the inner backend, and all that it may point into.
struct Inner {
  explicit Inner(const et::BackendInterface& backend) : backend(backend) {}
  ~Inner() {
    if (handle != nullptr) {
      backend.destroy(handle);
    }
  }
  Inner(const Inner&) = delete;
  Inner& operator=(const Inner&) = delete;

  const et::BackendInterface& backend;
  Arena arena;
  PinnedMap map;
  std::vector<std::shared_ptr<const BlobName>> names; // parallel to the constants
  et::DelegateHandle* handle = nullptr;
};

/// Live delegates: one of them can put the inner backend's shared state in order after a failure.
struct Live {
  std::mutex mutex;
  std::set<Delegate*> all;
};

Live& live() {
  static auto* delegates = new Live;
  return *delegates;
}

/// Bytes of constants that come from ExecuTorch's data map.
struct Fixed {
  std::optional<et::FreeableBuffer> buffer;
  std::vector<uint8_t> copy; // if another key has the same address
  View view;
  std::string digest;
};

class Delegate {
 public:
  Delegate(et::BackendInitContext& context, const et::FreeableBuffer& processed, et::ArrayRef<et::CompileSpec> specs)
      : cache_(scoped_cache), method_(context.get_method_name() ? context.get_method_name() : "") {
    try {
      payload_ = read_delegate_payload(static_cast<const uint8_t*>(processed.data()), processed.size());
    } catch (const FormatError& error) {
      throw Failure{
          EtError::DelegateInvalidCompatibility,
          ErrorKind::InvalidFile,
          std::string("the payload of a BlobStoreBackend is damaged: ") + error.what()};
    }
    const auto* start = static_cast<const uint8_t*>(processed.data());
    bytes_.assign(start, start + payload_.size);
    backend_ = et::get_backend_class(payload_.inner.c_str());
    if (backend_ == nullptr || !backend_->is_available()) {
      throw Failure{
          EtError::NotFound,
          ErrorKind::MissingBackend,
          "it runs on backend '" + payload_.inner + "', which this process does not have"};
    }
    for (const et::CompileSpec& spec : specs) {
      if (std::strcmp(spec.key, kTableSpec) != 0) {
        specs_.push_back(spec);
      }
    }
    const auto options = context.runtime_specs();
    options_.assign(options.begin(), options.end());
    const bool told = std::any_of(options_.begin(), options_.end(), [](const et::BackendOption& option) {
      return std::strcmp(option.key, kWeightCacheOption) == 0;
    });
    if (!told) {
      et::BackendOption option{};
      std::strncpy(option.key, kWeightCacheOption, sizeof option.key - 1);
      option.value = true;
      options_.push_back(option);
    }
    find_constants(context.get_named_data_map());
    {
      const MaybeReading reading(cache_.get());
      generation_ = cache_ ? cache_->generation() : 0;
      identities_ = identify();
      inner_ = make(context.event_tracer());
    }
    fixed_.shrink_to_fit();
    const std::lock_guard<std::mutex> guard(live().mutex);
    live().all.insert(this);
  }

  ~Delegate() {
    const std::lock_guard<std::mutex> guard(live().mutex);
    live().all.erase(this);
  }

  EtError execute(et::BackendExecutionContext& context, et::Span<et::EValue*> arguments) {
    const MaybeReading reading(cache_.get()); // before the lock, as in a Method, which may wait for it with a Reading
    const std::lock_guard<std::mutex> turn(mutex_);
    refresh();
    return backend_->execute(context, inner_->handle, arguments);
  }

  /// Initialize the inner backend once more with what it has now. Whether that worked.
  bool repeat() {
    const std::unique_lock<std::mutex> turn(mutex_, std::try_to_lock);
    if (!turn.owns_lock()) {
      return false;
    }
    return again(*inner_);
  }

 private:
  /// Where every constant is; of all of them, before anything is initialized: an inner backend that fails halfway
  /// leaves its shared cache in disorder.
  void find_constants(const et::NamedDataMap* map) {
    std::set<const void*> addresses;
    std::string missing;
    for (const DelegateConstant& constant : payload_.constants) {
      Fixed fixed;
      const Blob* blob = cache_ ? cache_->find(constant.key) : nullptr;
      size_t size = 0;
      if (blob != nullptr) {
        size = blob->size;
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
    std::vector<Identity> identities;
    identities.reserve(blobs_.size());
    for (size_t i = 0; i < blobs_.size(); ++i) {
      Identity identity;
      if (blobs_[i] != nullptr) {
        const BlobCache* owner = cache_.get();
        while (!owner->owns(payload_.constants[i].key)) {
          owner = owner->base().get();
        }
        identity = {owner, owner->version(payload_.constants[i].key)};
      }
      identities.push_back(identity);
    }
    return identities;
  }

  /// If the cache went on: pack what changed. On failure the old handle stays, and the next call tries again.
  void refresh() {
    if (!cache_) {
      return;
    }
    const uint64_t generation = cache_->generation();
    if (generation == generation_) {
      return;
    }
    if (!cache_->closed()) { // a closed cache keeps its weights as they are
      std::vector<Identity> identities = identify();
      if (identities != identities_) {
        std::swap(identities, identities_);
        try {
          std::unique_ptr<Inner> next = make(nullptr);
          inner_.swap(next); // the old one goes last: until then what it packed is there to be shared
          next.reset();
          give_back(identities);
        } catch (...) {
          std::swap(identities, identities_);
          throw;
        }
      }
    }
    generation_ = generation;
  }

  /// What the old handle had packed is free now, but malloc keeps it where something newer lies above. If it is much,
  /// have it given back to the system.
  void give_back(const std::vector<Identity>& before) const {
    uint64_t changed = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      changed += before[i] == identities_[i] ? 0 : payload_.constants[i].nbytes;
    }
#if defined(__GLIBC__)
    if (changed >= kMuch) {
      malloc_trim(0);
    }
#else
    (void)changed;
#endif
  }

  std::unique_ptr<Inner> make(et::EventTracer* tracer) {
    auto inner = std::make_unique<Inner>(*backend_);
    std::map<uint32_t, std::string> groups;
    std::vector<std::string> own(blobs_.size());
    for (size_t i = 0; i < blobs_.size(); ++i) {
      const DelegateConstant& constant = payload_.constants[i];
      std::string& text = own[i];
      text = constant.key;
      text += '\0';
      if (identities_[i].owner != nullptr) {
        text += std::to_string(identities_[i].owner->id()) + ":" + std::to_string(identities_[i].version);
      } else {
        text += fixed_[i].digest + std::to_string(constant.nbytes);
      }
      text += '\0';
      groups[constant.group] += text;
    }
    for (size_t i = 0; i < blobs_.size(); ++i) {
      const DelegateConstant& constant = payload_.constants[i];
      inner->names.push_back(BlobName::of(payload_.inner + '\0' + own[i] + '\0' + groups[constant.group]));
      const View view = blobs_[i] != nullptr ? View{blobs_[i]->data, blobs_[i]->size} : fixed_[i].view;
      inner->map.views.emplace(
          constant.key.substr(0, constant.key.size() - kVersionSize) + inner->names.back()->text(), view);
    }
    const EtError error = init(*inner, tracer);
    if (error != EtError::Ok) {
      recover();
      throw Failure{
          error,
          ErrorKind::Program,
          "backend '" + payload_.inner + "' cannot be initialized: ExecuTorch's " + et::to_string(error)};
    }
    return inner;
  }

  /// Give the inner backend its payload, with versions in the names.
  EtError init(Inner& inner, et::EventTracer* tracer) const {
    auto* copy = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes_.size() + 63) / 64 * 64 + 64));
    if (copy == nullptr) {
      return EtError::MemoryAllocationFailed;
    }
    std::memcpy(copy, bytes_.data(), bytes_.size());
    for (size_t i = 0; i < payload_.constants.size(); ++i) {
      const std::string version = inner.names[i]->text();
      for (const uint64_t place : payload_.constants[i].places) {
        std::memcpy(copy + place, version.data(), kVersionSize);
      }
    }
    et::FreeableBuffer processed(
        copy, bytes_.size(), [](void*, void* data, size_t) { std::free(data); }, nullptr);
    et::BackendInitContext context(
        &inner.arena,
        tracer,
        method_.c_str(),
        &inner.map,
        et::Span<const et::BackendOption>(options_.data(), options_.size()));
    init_count.fetch_add(1, std::memory_order_relaxed);
    auto handle = backend_->init(context, &processed, et::ArrayRef<et::CompileSpec>(specs_.data(), specs_.size()));
    if (!handle.ok()) {
      return handle.error();
    }
    inner.handle = handle.get();
    return EtError::Ok;
  }

  /// As `inner` was initialized, once more, and let go of it.
  bool again(const Inner& inner) const {
    Inner copy(*backend_);
    copy.names = inner.names;
    copy.map.views = inner.map.views;
    return init(copy, nullptr) == EtError::Ok;
  }

  /// XNNPACK shares one cache of packed weights, and an initialization that fails leaves it unusable for all until one
  /// succeeds. So let one succeed: of ours, as it was, or of any other delegate.
  void recover() {
    if (inner_ != nullptr) {
      (void)again(*inner_);
      return;
    }
    const std::lock_guard<std::mutex> guard(live().mutex);
    for (Delegate* other : live().all) {
      if (other->repeat()) {
        return;
      }
    }
  }

  std::shared_ptr<const BlobCache> cache_;
  std::string method_;
  DelegatePayload payload_;
  std::vector<uint8_t> bytes_;
  et::BackendInterface* backend_ = nullptr;
  std::vector<et::CompileSpec> specs_; // they point into the program
  std::vector<et::BackendOption> options_;
  std::vector<const Blob*> blobs_; // parallel to the constants; null: in fixed_
  std::vector<Fixed> fixed_; // parallel too
  std::mutex mutex_; // what follows
  uint64_t generation_ = 0;
  std::vector<Identity> identities_;
  std::unique_ptr<Inner> inner_;
};

class BlobStoreBackend final : public et::BackendInterface {
 public:
  ~BlobStoreBackend() override = default;

  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext& context,
      et::FreeableBuffer* processed,
      et::ArrayRef<et::CompileSpec> specs) const override {
    EtError error;
    try {
      auto delegate = std::make_unique<Delegate>(context, *processed, specs);
      processed->Free();
      return delegate.release();
    } catch (const Failure& failure) {
      error = report(failure);
    } catch (const Error& failure) {
      error = report({EtError::AccessFailed, failure.kind(), failure.what()});
    } catch (const std::bad_alloc&) {
      error = report({EtError::MemoryAllocationFailed, ErrorKind::Program, "out of memory"});
    }
    return error;
  }

  EtError execute(
      et::BackendExecutionContext& context,
      et::DelegateHandle* handle,
      et::Span<et::EValue*> arguments) const override {
    try {
      return static_cast<Delegate*>(handle)->execute(context, arguments);
    } catch (const Failure& failure) {
      return report(failure);
    } catch (const Error& failure) {
      return report({EtError::AccessFailed, failure.kind(), failure.what()});
    } catch (const std::bad_alloc&) {
      return report({EtError::MemoryAllocationFailed, ErrorKind::Execution, "out of memory"});
    }
  }

  void destroy(et::DelegateHandle* handle) const override { delete static_cast<Delegate*>(handle); }
};

} // namespace

void register_delegate() {
  static const bool done = [] {
    static auto* backend = new BlobStoreBackend;
    (void)et::register_backend({kBackendId, backend});
    return true;
  }();
  (void)done;
}

CacheScope::CacheScope(std::shared_ptr<const BlobCache> cache) : before_(std::move(scoped_cache)) {
  scoped_cache = std::move(cache);
}

CacheScope::~CacheScope() {
  scoped_cache = std::move(before_);
}

std::optional<DelegateFailure> take_delegate_failure() {
  std::optional<DelegateFailure> failure;
  std::swap(failure, last_failure);
  return failure;
}

DelegateStats delegate_stats() {
  DelegateStats stats;
  {
    const std::lock_guard<std::mutex> guard(live().mutex);
    stats.handles = live().all.size();
  }
  stats.inits = init_count.load(std::memory_order_relaxed);
  stats.names = BlobName::count();
  return stats;
}

} // namespace blobstore
