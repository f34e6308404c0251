#include "delegate/inner_handle.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <unordered_set>
#include <utility>

#include "os/fork.h"
#include "os/heap.h"
#include "os/process_end.h"
#include "os/text.h"

namespace blobstore::internal {

namespace {

constexpr size_t kRoomBehind = 128; // bytes that backends may read behind the end

/// All handles of this process.
struct Handles : ForkAware {
  std::recursive_mutex mutex; // held while one is initialized or destroyed
  std::vector<const InnerHandle*> all; // those that were initialized
  std::atomic<uint64_t> recoveries{0};
  std::atomic<uint64_t> inits{0};

  static Handles& get() {
    static auto* handles = new Handles; // delegates may be destroyed while the process ends, in any order
    return *handles;
  }

  Handles() {
    (void)BlobName::count(); // makes the names enter first, so that their lock is taken last
    enter();
  }

  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override { renew(mutex); }
};

struct Turn {
  explicit Turn(std::recursive_mutex& mutex) : guard(mutex) {}
  BackendWork work; // first, so that a thread that waits for ever holds no lock
  std::lock_guard<std::recursive_mutex> guard;
};

} // namespace

AlignedCopy aligned_copy(const void* data, size_t size) {
  AlignedCopy copy = make_memory(size + kRoomBehind);
  if (size != 0) {
    std::memcpy(copy.get(), data, size);
  }
  return copy;
}

et::Result<const et::TensorLayout> PinnedMap::get_tensor_layout(std::string_view) const {
  return EtError::NotImplemented;
}

et::Result<et::FreeableBuffer> PinnedMap::get_data(std::string_view key) const {
  const auto found = views.find(key);
  if (found == views.end()) {
    return EtError::NotFound;
  }
  return et::FreeableBuffer(found->second.data, found->second.size, nullptr);
}

EtError PinnedMap::load_data_into(std::string_view key, void* buffer, size_t size) const {
  const auto found = views.find(key);
  if (found == views.end()) {
    return EtError::NotFound;
  }
  if (size != found->second.size) {
    return EtError::InvalidArgument;
  }
  std::memcpy(buffer, found->second.data, size);
  return EtError::Ok;
}

et::Result<uint32_t> PinnedMap::get_num_keys() const {
  return static_cast<uint32_t>(views.size());
}

et::Result<const char*> PinnedMap::get_key(uint32_t index) const {
  if (index >= views.size()) {
    return EtError::InvalidArgument;
  }
  return std::next(views.begin(), index)->first.c_str();
}

std::string entry_name(const DelegateConstant& constant, const BlobName& name) {
  if (constant.places.empty()) { // nothing in the payload could ask for another name
    return constant.key;
  }
  return constant.key.substr(0, constant.key.size() - kKeyVersionSize) + name.text();
}

/// While this lives, memory that has several names is at another address for each, because XNNPACK takes the name of
/// what it packs by the address. The copies are made for an initialization only, except those of what a backend reads
/// later.
class InnerHandle::Apart {
 public:
  explicit Apart(InnerHandle& handle) {
    std::unordered_set<const void*> taken;
    for (const auto& [name, view] : handle.map_.views) {
      taken.insert(view.data);
    }
    if (taken.size() == handle.map_.views.size()) {
      return;
    }
    taken.clear();
    const std::vector<DelegateConstant>& constants = handle.setup_->payload.constants;
    std::set<const ConstBytes*> done;
    for (const bool packed : {false, true}) { // what is only packed makes room
      for (size_t i = 0; i < constants.size(); ++i) {
        ConstBytes& view = handle.map_.views.find(entry_name(constants[i], *handle.names_[i]))->second;
        if (constants[i].packed != packed || !done.insert(&view).second || taken.insert(view.data).second) {
          continue;
        }
        AlignedCopy& copy = (packed ? copies_ : handle.kept_).emplace_back(aligned_copy(view.data, view.size));
        if (packed) {
          before_.emplace_back(&view, view.data);
        }
        view.data = copy.get();
      }
    }
  }
  ~Apart() {
    for (const auto& [view, data] : before_) {
      view->data = data;
    }
  }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

 private:
  std::vector<AlignedCopy> copies_;
  std::vector<std::pair<ConstBytes*, const void*>> before_;
};

InnerHandle::InnerHandle(
    std::shared_ptr<const InnerSetup> setup,
    std::vector<std::shared_ptr<const BlobName>> names,
    const std::vector<InnerConstant>& constants,
    std::vector<AlignedCopy> kept,
    et::EventTracer* tracer)
    : setup_(std::move(setup)), names_(std::move(names)), kept_(std::move(kept)) {
  std::vector<ConstBytes*> views;
  for (size_t i = 0; i < constants.size(); ++i) {
    std::string name = entry_name(setup_->payload.constants[i], *names_[i]);
    const auto [known, fresh] = map_.views.emplace(std::move(name), constants[i].view);
    if (!fresh && known->second.size != constants[i].view.size) { // only hostile payloads have such names
      throw Failure{
          EtError::InvalidProgram,
          ErrorKind::Program,
          format(
              "two constants have the name '{}', one with {} and one with {} bytes",
              known->first,
              known->second.size,
              constants[i].view.size)};
    }
    views.push_back(&known->second);
  }
  Handles& handles = Handles::get();
  const Turn turn(handles.mutex);
  handles.all.reserve(handles.all.size() + 1);
  const EtError error = init(tracer);
  if (error != EtError::Ok) {
    recover();
    handles.recoveries.fetch_add(1, std::memory_order_release);
    throw Failure{
        error,
        ErrorKind::Program,
        format("backend '{}' cannot be initialized: ExecuTorch's {}", setup_->payload.inner, et::to_string(error))};
  }
  for (size_t i = 0; i < constants.size(); ++i) {
    if (constants[i].afterwards != nullptr) {
      views[i]->data = constants[i].afterwards;
    }
  }
  handles.all.push_back(this);
}

InnerHandle::InnerHandle(const InnerHandle* other) : setup_(other->setup_), names_(other->names_) {
  map_.views = other->map_.views;
  (void)init(nullptr);
}

InnerHandle::~InnerHandle() {
  Handles& handles = Handles::get();
  const Turn turn(handles.mutex);
  handles.all.erase(std::remove(handles.all.begin(), handles.all.end(), this), handles.all.end());
  if (handle_ != nullptr) {
    setup_->backend->destroy(handle_);
    if (PackedPages* const pages = setup_->packed.changing(); on_file_ && pages != nullptr) {
      pages->after_destroy();
    }
  }
}

EtError InnerHandle::execute(et::BackendExecutionContext& context, et::Span<et::EValue*> arguments) const {
  Handles& handles = Handles::get();
  const BackendWork work;
  const uint64_t before = handles.recoveries.load(std::memory_order_acquire);
  EtError error = setup_->backend->execute(context, handle_, arguments);
  if (error != EtError::Ok) {
    const Turn turn(handles.mutex); // if an initialization failed meanwhile, wait until the cache is in order
    if (handles.recoveries.load(std::memory_order_acquire) != before) {
      error = setup_->backend->execute(context, handle_, arguments);
    }
  }
  return error;
}

void InnerHandle::settle_names() const noexcept {
  for (const auto& name : names_) {
    name->settle();
  }
}

void InnerHandle::retire(const InnerSetup& setup) {
  const Turn turn(Handles::get().mutex);
  setup.retired = true;
}

uint64_t InnerHandle::count() {
  return Handles::get().inits.load(std::memory_order_relaxed);
}

void InnerHandle::watch_forks() {
  const BackendWork first; // makes its fork handler enter first, so that its lock is taken last
  Handles::get();
}

/// The inner payload with the blobs in its holes.
std::shared_ptr<uint8_t[]> InnerHandle::fill() const {
  const DelegatePayload& payload = setup_->payload;
  std::shared_ptr<uint8_t[]> filled = make_memory(payload.filled + kRoomBehind);
  const uint8_t* rest = setup_->bytes.data();
  uint8_t* at = filled.get();
  const auto copy = [&](const void* data, size_t size) {
    if (size != 0) {
      std::memcpy(at, data, size);
      at += size;
    }
  };
  for (const Hole& hole : payload.holes) {
    const size_t before = hole.start - static_cast<size_t>(at - filled.get());
    copy(rest, before);
    rest += before;
    const ConstBytes& blob =
        map_.views.find(entry_name(payload.constants[hole.constant], *names_[hole.constant]))->second;
    copy(blob.data, blob.size);
  }
  copy(rest, static_cast<size_t>(setup_->bytes.data() + setup_->bytes.size() - rest));
  return filled;
}

/// Give the inner backend its payload, with blobs in the holes and versions in the names.
EtError InnerHandle::init(et::EventTracer* tracer) {
  const InnerSetup& setup = *setup_;
  const Apart apart(*this);
  auto copy = std::make_unique<std::shared_ptr<uint8_t[]>>(fill());
  uint8_t* const start = copy->get();
  for (size_t i = 0; i < names_.size(); ++i) {
    const std::string version = names_[i]->text();
    for (const uint64_t place : setup.payload.constants[i].places) {
      std::memcpy(start + place, version.data(), kKeyVersionSize);
    }
  }
  const auto free = [](void* context, void*, size_t) { delete static_cast<std::shared_ptr<uint8_t[]>*>(context); };
  processed_.emplace(start, setup.payload.filled, free, copy.release());
  std::vector<et::BackendOption> options(setup.options);
  options.push_back(packed_path_option(path())); // also if it is empty: the process may have a path for all loads
  et::BackendInitContext context(
      &arena_, tracer, setup.method.c_str(), &map_, et::Span<const et::BackendOption>(options.data(), options.size()));
  Handles::get().inits.fetch_add(1, std::memory_order_relaxed);
  const et::ArrayRef<et::CompileSpec> specs(setup.specs.data(), setup.specs.size());
  PackedPages* const pages = setup.packed.changing();
  if (pages != nullptr) {
    pages->before_init();
  }
  auto handle = setup.backend->init(context, &*processed_, specs);
  if (!handle.ok()) {
    return handle.error();
  }
  try {
    on_file_ = pages != nullptr && pages->after_init();
    if (pages != nullptr && !on_file_ && setup.writes_packed) { // what it packed to the heap would not follow
      throw_error_in(ErrorKind::FileAccess, pages->lease().path(), "ExecuTorch did not map the file");
    }
  } catch (...) {
    setup.backend->destroy(handle.get());
    throw;
  }
  handle_ = handle.get();
  return EtError::Ok;
}

/// The file in which the inner backend looks for packed weights. Into that of the application it may also write, so
/// names that count versions in this process must not get there: in another process they stand for other weights.
const std::string& InnerHandle::path() const {
  static const std::string none;
  if (!setup_->packed.path.empty()) {
    return setup_->packed.path;
  }
  const bool all = std::all_of(names_.begin(), names_.end(), [](const auto& name) { return name->is_of_content(); });
  return all ? setup_->own_path : none;
}

/// Let an initialization succeed: that of an existing handle, preferably of the same delegate. Its weights are packed
/// already. XNNPACK has one cache of packed weights for each path. Backends whose weights are in holes have none.
void InnerHandle::recover() const {
  if (!setup_->payload.holes.empty()) {
    return;
  }
  const std::vector<const InnerHandle*>& all = Handles::get().all;
  for (const bool same : {true, false}) {
    for (const InnerHandle* other : all) {
      if ((other->setup_ == setup_) == same && other->setup_->backend == setup_->backend && other->path() == path() &&
          !other->setup_->retired && InnerHandle(other).handle_ != nullptr) {
        return;
      }
    }
  }
}

} // namespace blobstore::internal
