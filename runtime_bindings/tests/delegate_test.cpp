// Runs the delegate on an inner backend that packs, keeps, shares and fails as XNNPACK does, under sanitizers.
//
//   delegate_test FOLDER
//
// FOLDER has base.ptd with the keys "packed@..." and "kept@...", adapter.ptd with "own@...", copy.ptd, a working copy
// of base.ptd, and the payloads base.payload, both.payload, ways.payload, holes.payload and costly.payload. All blobs
// are float tensors of one size, filled with 1.

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include <sys/syscall.h>

#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/commit_follower.h>
#include <blobstore/data_map.h>
#include <blobstore/delegate.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

namespace et = executorch::runtime;

const std::string kPacked = "packed@0123456789abcdef";
const std::string kKept = "kept@0123456789abcdef";
const std::string kOwn = "own@0123456789abcdef";

std::string folder;
std::map<std::string, std::string> payloads;

/// A file with "packed" and "kept": for a shared cache a working copy.
std::string base_file(BlobCache::Mode mode) {
  return folder + (mode == BlobCache::Mode::Shared ? "/copy.ptd" : "/base.ptd");
}

std::shared_ptr<BlobCache> open_base(BlobCache::Mode mode = BlobCache::Mode::Private) {
  return BlobCache::open({base_file(mode)}, mode);
}

/// A cache with "own" on another one.
std::shared_ptr<BlobCache> open_above(
    const std::shared_ptr<BlobCache>& base, BlobCache::Mode mode = BlobCache::Mode::Private) {
  return BlobCache::open({folder + "/adapter.ptd"}, mode, base);
}

/// The value of all elements of a blob.
float value_of(const void* data, size_t size) {
  const auto* floats = static_cast<const float*>(data);
  for (size_t i = 1; i < size / sizeof(float); ++i) {
    CHECK(floats[i] == floats[0]);
  }
  return floats[0];
}

/// The payload is a list of keys: length (4 bytes), key, NUL, 'p' or 'k'. The toy packs blobs marked 'p' under their
/// names in a cache for all handles, and goes on reading blobs marked 'k'. As XNNPACK does, it knows them by their
/// addresses, which must have one name each. It refuses negative numbers, and is then
/// unusable until an initialization succeeds.
class Toy final : public et::BackendInterface {
 public:
  struct Handle {
    std::vector<std::string> names;
    std::vector<std::pair<const void*, size_t>> kept;
  };
  struct Packed {
    float value = 0;
    int users = 0;
  };

  bool is_available() const override { return true; }

  /// May throw.
  std::function<void()> at_init = [] {};
  std::function<void()> at_execute = [] {};
  /// The file for packed weights that it was given.
  const std::string& path() const { return path_; }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext& context, et::FreeableBuffer* processed, et::ArrayRef<et::CompileSpec>) const override {
    for (const et::BackendOption& option : context.runtime_specs()) {
      if (std::strcmp(option.key, "packed_cache_path") == 0) {
        path_ = std::get<std::array<char, et::kMaxOptionValueLength>>(option.value).data();
      }
      CHECK(std::strcmp(option.key, "save_weight_cache_on_disk") != 0);
    }
    at_init();
    const std::lock_guard<std::mutex> guard(mutex_);
    ready_ = false;
    auto handle = std::make_unique<Handle>();
    const auto* at = static_cast<const char*>(processed->data());
    const char* end = at + processed->size();
    bool good = true;
    std::map<const void*, std::string> names;
    while (at < end) {
      uint32_t length;
      std::memcpy(&length, at, sizeof length);
      const std::string name(at + 4, length);
      const char kind = at[4 + length + 1];
      at += 4 + length + 2;
      auto data = context.get_named_data_map()->get_data(name);
      CHECK(data.ok());
      CHECK(names.emplace(data->data(), name).first->second == name);
      if (kind == 'k') {
        handle->kept.emplace_back(data->data(), data->size());
        good = good && value_of(data->data(), data->size()) >= 0;
        continue;
      }
      const auto found = packed_.find(name);
      if (found == packed_.end()) {
        const float value = value_of(data->data(), data->size());
        good = good && value >= 0;
        packed_[name].value = value;
      }
      ++packed_[name].users;
      handle->names.push_back(name);
    }
    processed->Free();
    if (!good) { // what it packed stays behind, under its names
      return et::Error::Internal;
    }
    ready_ = true;
    return static_cast<et::DelegateHandle*>(handle.release());
  }

  et::Error execute(
      et::BackendExecutionContext&, et::DelegateHandle* opaque, et::Span<et::EValue*> arguments) const override {
    at_execute();
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!ready_) {
      return et::Error::Internal;
    }
    const auto* handle = static_cast<const Handle*>(opaque);
    const float first = packed_.at(handle->names[0]).value;
    for (const auto& [data, size] : handle->kept) {
      CHECK(value_of(data, size) == first); // one generation
    }
    double sum = first;
    for (size_t i = 1; i < handle->names.size(); ++i) {
      sum += 1000.0 * packed_.at(handle->names[i]).value;
    }
    *arguments[0] = et::EValue(sum);
    return et::Error::Ok;
  }

  void destroy(et::DelegateHandle* opaque) const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    CHECK(ready_);
    const std::unique_ptr<Handle> handle(static_cast<Handle*>(opaque));
    for (const std::string& name : handle->names) {
      if (--packed_.at(name).users == 0) {
        packed_.erase(name);
      }
    }
  }

 private:
  mutable std::mutex mutex_;
  mutable bool ready_ = true;
  mutable std::map<std::string, Packed> packed_;
  mutable std::string path_ = "none yet";
};

/// Its weights lie in the payload, twice, between other bytes: it goes on reading them there, and frees nothing. It
/// refuses negative numbers.
class Inside final : public et::BackendInterface {
 public:
  struct Handle {
    const uint8_t* data;
    size_t size;
  };

  bool is_available() const override { return true; }

  et::Result<et::DelegateHandle*> init(
      et::BackendInitContext&, et::FreeableBuffer* processed, et::ArrayRef<et::CompileSpec>) const override {
    const auto* data = static_cast<const uint8_t*>(processed->data());
    const size_t size = processed->size();
    CHECK(std::memcmp(data, "head", 4) == 0 && std::memcmp(data + size - 4, "tail", 4) == 0);
    CHECK(std::memcmp(data + size / 2 - 4, "between ", 8) == 0);
    if (value_of(data + 4, size / 2 - 8) < 0) {
      return et::Error::Internal;
    }
    return static_cast<et::DelegateHandle*>(new Handle{data, size});
  }

  et::Error execute(
      et::BackendExecutionContext&, et::DelegateHandle* opaque, et::Span<et::EValue*> arguments) const override {
    const auto* handle = static_cast<const Handle*>(opaque);
    const size_t half = handle->size / 2;
    const float first = value_of(handle->data + 4, half - 8);
    CHECK(value_of(handle->data + half + 4, half - 8) == first); // the blob lies there twice
    *arguments[0] = et::EValue(static_cast<double>(first));
    return et::Error::Ok;
  }

  void destroy(et::DelegateHandle* opaque) const override { delete static_cast<Handle*>(opaque); }
};

/// A delegate that is loaded from a payload.
class Loaded {
 public:
  Loaded(
      const std::shared_ptr<BlobCache>& cache,
      const std::string& name,
      const et::NamedDataMap* beside = nullptr,
      et::Span<const et::BackendOption> options = {})
      : backend_(et::get_backend_class("BlobStoreBackend")) {
    const CacheScope scope(cache);
    et::BackendInitContext context(&allocator_, nullptr, "toy", beside, options);
    const std::string& payload = payloads.at(name);
    et::FreeableBuffer processed(payload.data(), payload.size(), nullptr);
    auto handle = backend_->init(context, &processed, {});
    error_ = handle.error();
    if (handle.ok()) {
      handle_ = handle.get();
    }
  }
  ~Loaded() {
    if (handle_ != nullptr) {
      backend_->destroy(handle_);
    }
  }
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

  bool ok() const { return handle_ != nullptr; }
  et::Error error() const { return error_; }
  et::Error execute(et::EValue& out) {
    et::BackendExecutionContext context;
    et::EValue* arguments[] = {&out};
    return backend_->execute(context, handle_, {arguments, 1});
  }
  double run() {
    et::EValue out(0.0);
    CHECK(execute(out) == et::Error::Ok);
    return out.toDouble();
  }

 private:
  et::BackendInterface* backend_;
  executorch::extension::MallocMemoryAllocator allocator_;
  et::DelegateHandle* handle_ = nullptr;
  et::Error error_ = et::Error::Ok;
};

/// Commit one value to all keys that a cache owns. @returns whether it was accepted.
bool commit(BlobCache& cache, const std::vector<std::string>& keys, float value) {
  try {
    cache.update(filled(cache, keys, value));
    return true;
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::Program);
    CHECK(value < 0 && std::string(error.what()).find("nothing was changed") != std::string::npos);
    return false;
  }
}

/// Calls functions when a commit is prepared, when it takes effect, and when what was prepared is destroyed.
struct Follower final : CommitFollower {
  struct Made final : Prepared {
    explicit Made(const Follower& by) : by(by) {}
    ~Made() override { by.at_end(); }
    void apply() noexcept override { by.at_apply(); }
    const Follower& by;
  };
  std::unique_ptr<Prepared> prepare(const StagedCommit&) override {
    at_prepare();
    return std::make_unique<Made>(*this);
  }
  std::function<void()> at_prepare = [] {};
  std::function<void()> at_apply = [] {};
  std::function<void()> at_end = [] {};
};

/// Two operators pack one blob in two ways: each has its own, of which another delegate shares the first.
void test_two_ways() {
  const auto cache = open_base();
  const size_t before = delegate_stats().names;
  Loaded one(cache, "ways");
  CHECK(delegate_stats().names == before + 2);
  CHECK(one.run() == 1001);
  CHECK(served_delegates(*cache)[0].keys == std::vector<std::string>{kPacked});
  Loaded other(cache, "base");
  CHECK(delegate_stats().names == before + 3); // the blob that is read
  CHECK(commit(*cache, {kPacked, kKept}, 3) && one.run() == 3003 && other.run() == 3);
  CHECK(!commit(*cache, {kPacked, kKept}, -1) && one.run() == 3003 && other.run() == 3); // and back in order
  cache->revert();
  CHECK(one.run() == 1001 && other.run() == 1);
  const CacheDataMap beside(cache);
  Loaded third(nullptr, "ways", &beside);
  CHECK(third.run() == 1001);
}

void test_alone(BlobCache::Mode mode) {
  const auto cache = open_base(mode);
  Loaded one(cache, "base"), two(cache, "base");
  CHECK(one.run() == 1 && two.run() == 1);
  const std::vector<ServedDelegate> served = served_delegates(*cache);
  CHECK(served.size() == 2 && served[0].method == "toy" && served[0].keys.size() == 2 && served[0].others.empty());
  CHECK(served[0].program.empty()); // it is not mapped from a file, and has no data file
  CHECK(served[0].same_files.empty() && served[0].other_files == std::vector<uint64_t>{cache->id()});
  {
    const Loaded third(cache, "base");
    CHECK(served_delegates(*cache).size() == 3);
  }
  CHECK(served_delegates(*cache).size() == 2);
  for (int n = 2; n < 8; ++n) {
    const uint64_t generation = cache->generation();
    CHECK(commit(*cache, {kPacked, kKept}, static_cast<float>(n)));
    CHECK(cache->generation() == generation + 1);
    CHECK(one.run() == n && two.run() == n);
    CHECK(!commit(*cache, {kPacked, kKept}, -1));
    CHECK(cache->generation() == generation + 1);
    CHECK(one.run() == n && two.run() == n);
    const uint64_t inits = delegate_stats().inits;
    CHECK(one.run() == n && delegate_stats().inits == inits);
  }
  // one array for two keys
  const std::vector<float> shared(cache->at(kPacked).size / sizeof(float), 30);
  const size_t size = sizeof(float) * shared.size();
  cache->update({{kPacked, shared.data(), size, nullptr}, {kKept, shared.data(), size, nullptr}});
  CHECK(one.run() == 30 && two.run() == 30);
  if (mode != BlobCache::Mode::Shared) {
    cache->revert();
    CHECK(one.run() == 1 && two.run() == 1);
    CHECK(commit(*cache, {kPacked, kKept}, 9));
    cache->revert({kPacked, kKept});
    CHECK(one.run() == 1 && two.run() == 1);
  } else {
    CHECK(commit(*cache, {kPacked, kKept}, 1));
  }
}

/// A backend that reads its weights in its payload follows commits, and a failed one changes nothing.
void test_holes(BlobCache::Mode mode) {
  const auto cache = open_base(mode);
  Loaded one(cache, "holes"), two(cache, "holes");
  CHECK(one.run() == two.run());
  for (int n = 2; n < 6; ++n) {
    CHECK(commit(*cache, {kPacked}, static_cast<float>(n)));
    CHECK(one.run() == n && two.run() == n);
    const uint64_t inits = delegate_stats().inits;
    CHECK(!commit(*cache, {kPacked}, -1));
    CHECK(delegate_stats().inits == inits + 1); // nothing was initialized to recover
    CHECK(one.run() == n && two.run() == n);
  }
}

/// Two caches on one working copy stand for two processes: the next call on one finds what the other has committed.
void test_two_on_one_file() {
  const auto mine = open_base(BlobCache::Mode::Shared);
  const auto other = open_base(BlobCache::Mode::Shared);
  Loaded here(mine, "base"), there(other, "base");
  {
    const Repeating committer([&](int n) {
      CHECK(commit(*mine, {kPacked, kKept}, static_cast<float>(n)));
      here.run();
    });
    for (int n = 0; n < 30; ++n) {
      CHECK(commit(*other, {kPacked, kKept}, static_cast<float>(100 + n)));
      there.run();
    }
  }
  CHECK(here.run() == there.run());
}

/// A thread whose blocking the test can wait for.
class Watched {
 public:
  template <typename Work>
  explicit Watched(Work work) : thread_([this, work] { id_ = gettid(), work(); }) {}

  void join() { thread_.join(); }

  /// Wait until the thread sleeps in the kernel, without a time limit, for a mutex, a condition or the lock of a file:
  /// until it is found twice at the same place in such a system call.
  void until_blocked() const {
    for (std::string call, before;; before = call) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (id_ == 0) {
        continue;
      }
      std::ifstream file("/proc/self/task/" + std::to_string(id_) + "/syscall");
      CHECK(static_cast<bool>(std::getline(file, call))); // fails if the thread ended instead of waiting
      long number = -1;
      unsigned long timeout = 1;
      // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel wrote the numbers
      std::sscanf(call.c_str(), "%ld %*x %*x %*x %lx", &number, &timeout);
      // also the numbers of x86-64, where qemu runs the test for another machine
      const bool in_lock = number == SYS_flock || number == 73;
      const bool in_futex = number == SYS_futex || number == 202;
      if (call == before && (in_lock || (in_futex && timeout == 0))) {
        return;
      }
    }
  }

 private:
  std::atomic<pid_t> id_{0};
  std::thread thread_;
};

/// What followers prepared takes effect before another process can commit.
void test_effect_on_one_file() {
  const auto mine = open_base(BlobCache::Mode::Shared);
  const auto other = open_base(BlobCache::Mode::Shared);
  Loaded here(mine, "base");
  const auto onlooker = std::make_shared<Follower>();
  std::optional<Watched> rival;
  float seen = 0;
  onlooker->at_apply = [&] {
    rival.emplace([&] { CHECK(commit(*other, {kPacked, kKept}, 8)); });
    rival->until_blocked();
    seen = value_of(mine->at(kPacked).data, mine->at(kPacked).size);
  };
  mine->follow(onlooker);
  CHECK(commit(*mine, {kPacked, kKept}, 7));
  rival->join();
  CHECK(seen == 7);
  CHECK(here.run() == 8);
  CHECK(commit(*other, {kPacked, kKept}, 1));
}

void test_threads(BlobCache::Mode mode) {
  const auto cache = open_base(mode);
  Loaded one(cache, "base"), two(cache, "base");
  const Repeating first([&](int) { CHECK(one.run() >= 1); });
  const Repeating second([&](int) { CHECK(two.run() >= 1); });
  const Repeating loads([&](int) { // delegates come and go during commits, also while this thread reads
    auto mine = std::make_unique<Loaded>(cache, "base");
    CHECK(mine->ok() && mine->run() >= 1);
    const BlobCache::Reading reading(*cache);
    mine.reset();
  });
  for (int n = 1; n < 60; ++n) {
    CHECK(commit(*cache, {kPacked, kKept}, static_cast<float>(n)));
    if (n % 3 == 0) {
      CHECK(!commit(*cache, {kPacked, kKept}, -2));
    }
    if (n % 7 == 0 && mode != BlobCache::Mode::Shared) {
      cache->revert();
    }
  }
}

/// Handles prepared for a failed commit are never used for the next commit, which has the same version.
void test_failing_beside_good() {
  const auto cache = BlobCache::open({folder + "/base.ptd", folder + "/adapter.ptd"});
  Loaded first(cache, "base"), second(cache, "both"); // the second one refuses after the first has prepared
  const Repeating failing([&](int) {
    std::vector<Change> some = filled(*cache, {kPacked, kKept}, 77);
    some.push_back(filled(*cache, {kOwn}, -1)[0]);
    CHECK(fails(ErrorKind::Program, [&] { cache->update(some); }));
  });
  for (int n = 1; n < 150; ++n) {
    CHECK(commit(*cache, {kPacked, kKept, kOwn}, static_cast<float>(n)));
    CHECK(first.run() == n && second.run() == 1001.0 * n);
  }
}

/// Commit a value, and do something while the commit waits for a reader. @returns whether it was accepted.
bool commit_around(BlobCache& cache, float value, const std::function<void()>& work) {
  bool accepted = false;
  std::optional<Watched> committer;
  {
    const BlobCache::Reading reading(cache);
    committer.emplace([&] { accepted = commit(cache, {kPacked, kKept}, value); });
    committer->until_blocked();
    work();
  }
  committer->join();
  return accepted;
}

/// A delegate that is loaded while a commit waits for readers takes part in it.
void test_loading_while_a_commit_waits(BlobCache::Mode mode) {
  const auto cache = open_base(mode);
  CHECK(commit(*cache, {kPacked, kKept}, 1));
  std::unique_ptr<Loaded> late;
  CHECK(!commit_around(*cache, -1, [&] { late = std::make_unique<Loaded>(cache, "base"); }));
  CHECK(late->run() == 1);
}

/// A commit that waits while a delegate is constructed may use it as soon as it is complete.
void test_made_during_commits() {
  const auto cache = open_base();
  const CacheDataMap beside(open_above(nullptr)); // has the blob that the cache lacks
  const Repeating commits([&](int n) { CHECK(commit(*cache, {kPacked, kKept}, static_cast<float>(n % 9))); });
  for (int n = 0; n < 100; ++n) {
    Loaded mine(cache, "both", &beside);
    CHECK(mine.run() >= 1000);
  }
}

/// New bytes that point into the base are copied at one moment, for delegates and for the blob.
void test_bytes_of_the_base(BlobCache::Mode mode) {
  const auto base = open_base(mode);
  const auto middle = BlobCache::open({}, BlobCache::Mode::Private, base);
  const auto top = BlobCache::open({base_file(mode)}, BlobCache::Mode::Private, middle);
  CHECK(commit(*base, {kPacked, kKept}, 3));
  Loaded mine(top, "base");
  const auto interferer = std::make_shared<Follower>();
  interferer->at_prepare = [&] { CHECK(commit(*base, {kPacked, kKept}, 5)); };
  top->follow(interferer);
  const size_t size = base->at(kPacked).size;
  top->update({{kPacked, base->at(kPacked).data, size, nullptr}, {kKept, base->at(kKept).data, size, nullptr}});
  CHECK(value_of(base->at(kPacked).data, size) == 5);
  CHECK(value_of(top->at(kPacked).data, size) == 3 && value_of(top->at(kKept).data, size) == 3);
  CHECK(mine.run() == 3);
  Loaded other(top, "base");
  CHECK(other.run() == 3);
}

/// Let a working copy seem to have a damaged journal, or not; see cache/working_copy.h.
void mark(const std::string& path, uint64_t pending) {
  std::fstream file(path + ".commits", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(56);
  file.write(reinterpret_cast<const char*>(&pending), sizeof pending);
}

/// A commit that fails after all followers have prepared, because it cannot lock its base, drops what was prepared
/// before the next one begins.
void test_failing_after_preparing() {
  const std::string path = folder + "/copy.ptd";
  const auto base = open_base(BlobCache::Mode::Shared);
  const auto top = open_above(base);
  std::optional<Watched> next;
  const auto first = std::make_shared<Follower>();
  first->at_end = [&] {
    if (!next) {
      mark(path, 0);
      next.emplace([&] { CHECK(commit(*top, {kOwn}, 8)); });
      next->until_blocked();
    }
  };
  top->follow(first);
  Loaded mine(top, "both");
  CHECK(mine.run() == 1001);
  const auto last = std::make_shared<Follower>();
  last->at_prepare = [&] {
    if (!next) {
      mark(path, 1);
    }
  };
  top->follow(last);
  CHECK(fails(ErrorKind::Integrity, [&] { top->update(filled(*top, {kOwn}, 77)); }));
  next->join();
  CHECK(mine.run() == 8001);
}

void test_stack(BlobCache::Mode mode) {
  const auto base = open_base(mode);
  CHECK(commit(*base, {kPacked, kKept}, 1));
  const auto one = open_above(base);
  const auto two = open_above(base, BlobCache::Mode::Copy);
  {
    Loaded of_one(one, "both"), of_two(two, "both");
    const Repeating runs_one([&](int) { CHECK(of_one.run() >= 1001); });
    const Repeating runs_two([&](int) { CHECK(of_two.run() >= 1001); });
    const auto commits = [](BlobCache& cache, int n) {
      CHECK(commit(cache, {kOwn}, static_cast<float>(1 + n % 5)));
      CHECK(!commit(cache, {kOwn}, -1));
    };
    const Repeating commits_one([&](int n) { commits(*one, n); });
    const Repeating commits_two([&](int n) { commits(*two, n); });
    for (int n = 1; n < 40; ++n) {
      CHECK(commit(*base, {kPacked, kKept}, static_cast<float>(n)));
    }
  }
  CHECK(commit(*one, {kOwn}, 7));
  CHECK(commit(*two, {kOwn}, 8));
  Loaded first(one, "both"), second(two, "both");
  CHECK(first.run() == 39 + 7000 && second.run() == 39 + 8000);
  CHECK(commit(*base, {kPacked, kKept}, 5));
  CHECK(first.run() == 5 + 7000 && second.run() == 5 + 8000);
  one->close(); // its own weights stay as they are
  CHECK(first.run() == 5 + 7000);
  CHECK(commit(*base, {kPacked, kKept}, 6)); // but those of the base change
  CHECK(first.run() == 6 + 7000 && second.run() == 6 + 8000);
  base->close();
  CHECK(commit(*two, {kOwn}, 9));
  CHECK(first.run() == 6 + 7000 && second.run() == 6 + 9000);
}

/// After closing, new commits are refused; a commit that has begun happens.
void test_closing_during_a_commit(BlobCache::Mode mode) {
  const auto cache = open_base(mode);
  CHECK(commit(*cache, {kPacked, kKept}, 1));
  Loaded mine(cache, "base");
  CHECK(commit_around(*cache, 4, [&] { cache->close(); }));
  CHECK(mine.run() == 4);
}

/// No exception reaches ExecuTorch, and the reason can be asked for.
void test_exceptions(Toy& toy) {
  const auto cache = open_base();
  Loaded good(cache, "base");
  const auto nothing = [] {};
  const std::pair<std::function<void()>, et::Error> cases[] = {
      {[] { throw std::bad_alloc(); }, et::Error::MemoryAllocationFailed},
      {[] { throw std::length_error("too long"); }, et::Error::Internal},
      {[] { throw 7; }, et::Error::Internal},
  };
  for (const auto& [thrower, error] : cases) {
    (void)take_delegate_failure();
    toy.at_init = thrower;
    CHECK(Loaded(cache, "base").error() == error);
    CHECK(take_delegate_failure().has_value());
    toy.at_init = nothing;
    toy.at_execute = thrower;
    et::EValue out(0.0);
    CHECK(good.execute(out) == error);
    CHECK(take_delegate_failure().has_value());
    toy.at_execute = nothing;
    CHECK(good.run() == 1);
    toy.at_init = thrower; // an update that cannot be prepared
    bool thrown = false;
    try {
      cache->update(filled(*cache, {kPacked}, 5));
    } catch (...) {
      thrown = true;
    }
    CHECK(thrown && cache->generation() == 0 && value_of(cache->at(kPacked).data, cache->at(kPacked).size) == 1);
    toy.at_init = nothing;
    CHECK(good.run() == 1);
  }
}

/// The application's file for packed weights is used for weights that are as in their file, whose names are the same in
/// every process. The names of others count versions in this process, and never get there.
void test_options(const Toy& toy) {
  const auto cache = open_base();
  std::array<char, et::kMaxOptionValueLength> file{};
  std::strcpy(file.data(), "/tmp/packed");
  et::BackendOption options[2];
  std::strcpy(options[0].key, "packed_cache_path");
  options[0].value = file;
  std::strcpy(options[1].key, "save_weight_cache_on_disk");
  options[1].value = true;
  Loaded one(cache, "base", nullptr, {options, 2});
  CHECK(one.ok() && toy.path() == "/tmp/packed");
  CHECK(commit(*cache, {kPacked, kKept}, 5) && one.run() == 5);
  CHECK(toy.path().empty());
}

/// A payload of half a megabyte whose description stands for gigabytes is refused.
void test_costly_payload() {
  CHECK(Loaded(open_base(), "costly").error() == et::Error::DelegateInvalidCompatibility);
}

/// A child that is forked while a commit is prepared commits other bytes.
void test_fork_of_a_prepared_commit(BlobCache::Mode mode) {
  const auto cache = open_base(mode);
  Loaded one(cache, "base");
  CHECK(commit(*cache, {kPacked, kKept}, 3));
  const auto in_child = [&] {
    CHECK(one.run() == 3);
    for (const float value : {7.0f, 8.0f}) {
      CHECK(commit(*cache, {kPacked, kKept}, value));
      CHECK(one.run() == static_cast<double>(value));
    }
  };
  const auto forker = std::make_shared<Follower>();
  bool is_armed = true;
  forker->at_prepare = [&] {
    const pid_t child = is_armed ? fork() : 1;
    is_armed = false;
    if (child == 0) {
      std::thread(in_child).join(); // as in any child, nothing of the commit is on this thread's stack
      _exit(0);
    }
    int status = 0;
    CHECK(child == 1 || (waitpid(child, &status, 0) == child && status == 0));
  };
  cache->follow(forker); // prepares after the delegate
  CHECK(commit(*cache, {kPacked, kKept}, 4));
  CHECK(!is_armed && one.run() == 4);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  et::runtime_init();
  register_delegate();
  static Toy toy;
  CHECK(et::register_backend({"ToyBackend", &toy}) == et::Error::Ok);
  static Inside inside;
  CHECK(et::register_backend({"InsideBackend", &inside}) == et::Error::Ok);
  folder = argv[1];
  for (const char* name : {"base", "both", "ways", "holes", "costly"}) {
    payloads[name] = read(folder + "/" + name + ".payload");
  }
  for (const auto mode : kModes) {
    test_alone(mode);
    test_threads(mode);
    test_loading_while_a_commit_waits(mode);
    test_closing_during_a_commit(mode);
    test_bytes_of_the_base(mode);
    test_holes(mode);
  }
  test_two_ways();
  test_exceptions(toy);
  test_options(toy);
  test_costly_payload();
  test_fork_of_a_prepared_commit(BlobCache::Mode::Private);
  test_fork_of_a_prepared_commit(BlobCache::Mode::Copy);
  test_failing_beside_good();
  test_made_during_commits();
  test_two_on_one_file();
  test_effect_on_one_file();
  test_failing_after_preparing();
  test_stack(BlobCache::Mode::Private);
  test_stack(BlobCache::Mode::Shared);
  const DelegateStats stats = delegate_stats();
  CHECK(stats.handles == 0 && stats.names == 0);
}
