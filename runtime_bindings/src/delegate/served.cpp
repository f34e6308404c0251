#include "delegate/served.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "os/fork.h"
#include "os/mapped_files.h"

namespace blobstore::internal {
namespace {

/// All of this process.
struct List : ForkAware {
  std::mutex mutex;
  std::vector<const Served*> all;
  std::atomic<uint64_t> changes{0};

  static List& get() {
    static auto* list = new List; // delegates may be destroyed while the process ends, in any order
    return *list;
  }

  List() { enter(); }

  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override { renew(mutex); }
};

/// For each cache of a stack that owns constants, the smallest that is not empty.
std::map<const BlobCache*, const DelegateConstant*> samples(
    const BlobCache& cache, const std::vector<DelegateConstant>& constants) {
  std::map<const BlobCache*, const DelegateConstant*> found;
  for (const DelegateConstant& constant : constants) {
    for (const BlobCache* owner = &cache; owner != nullptr; owner = owner->base().get()) {
      if (owner->owns(constant.key)) {
        const DelegateConstant*& sample = found[owner];
        if (constant.nbytes != 0 && (sample == nullptr || constant.nbytes < sample->nbytes)) {
          sample = &constant;
        }
        break;
      }
    }
  }
  return found;
}

} // namespace

Served::Served(
    std::shared_ptr<const BlobCache> cache,
    std::string method,
    const char* name,
    const void* program,
    const et::NamedDataMap* map,
    const std::vector<DelegateConstant>& constants)
    : cache_(std::move(cache)), name_(name), map_(map) {
  about_.method = std::move(method);
  std::set<std::string_view> seen; // several constants may have one key
  for (const DelegateConstant& constant : constants) {
    if (seen.insert(constant.key).second) {
      (cache_->find(constant.key) != nullptr ? about_.keys : about_.others).push_back(constant.key);
    }
  }
  std::map<const BlobCache*, const DelegateConstant*> unknown = samples(*cache_, constants);
  List& list = List::get();
  {
    const std::lock_guard<std::mutex> guard(list.mutex);
    for (const Served* other : list.all) {
      if (name_ != nullptr && other->name_ == name_ && other->map_ == map_ && other->cache_ == cache_) {
        learn(*other, unknown);
        program = nullptr;
      }
    }
  }
  look_up(program, unknown);
  const std::lock_guard<std::mutex> guard(list.mutex);
  list.all.push_back(this);
  list.changes.fetch_add(1);
}

void Served::learn(const Served& other, std::map<const BlobCache*, const DelegateConstant*>& unknown) {
  about_.program = other.about_.program;
  about_.inode = other.about_.inode;
  for (auto at = unknown.begin(); at != unknown.end();) {
    const uint64_t id = at->first->id();
    const auto has = [&](const std::vector<uint64_t>& ids) {
      return std::find(ids.begin(), ids.end(), id) != ids.end();
    };
    if (has(other.about_.same_files)) {
      about_.same_files.push_back(id);
    } else if (has(other.about_.other_files)) {
      about_.other_files.push_back(id);
    } else {
      ++at;
      continue;
    }
    at = unknown.erase(at);
  }
}

void Served::look_up(const void* program, const std::map<const BlobCache*, const DelegateConstant*>& unknown) {
  std::vector<const void*> addresses{program};
  std::vector<const BlobCache*> owners;
  std::vector<et::FreeableBuffer> held; // until the addresses have been looked up
  for (const auto& [owner, sample] : unknown) {
    if (sample == nullptr) {
      continue; // empty blobs say nothing
    }
    if (owner->mode() != BlobCache::Mode::Shared) {
      about_.other_files.push_back(owner->id()); // commits to other caches never reach the file
      continue;
    }
    owners.push_back(owner);
    addresses.push_back(owner->find(sample->key)->data);
    addresses.push_back(nullptr);
    if (map_ != nullptr) {
      if (auto data = map_->get_data(sample->key); data.ok()) {
        addresses.back() = data->data();
        held.push_back(std::move(data.get()));
      }
    }
  }
  if (program == nullptr && owners.empty()) {
    return; // reading the list of all maps may take a millisecond
  }
  const std::vector<std::optional<MappedFile>> files = mapped_files(addresses);
  if (files[0]) {
    about_.program = files[0]->path;
    about_.inode = files[0]->inode;
  }
  for (size_t i = 0; i < owners.size(); ++i) {
    const auto& ours = files[1 + 2 * i];
    const auto& theirs = files[2 + 2 * i];
    const bool same = ours && theirs && *ours == *theirs;
    (same ? about_.same_files : about_.other_files).push_back(owners[i]->id());
  }
}

Served::~Served() {
  List& list = List::get();
  const std::lock_guard<std::mutex> guard(list.mutex);
  list.all.erase(std::remove(list.all.begin(), list.all.end(), this), list.all.end());
  list.changes.fetch_add(1);
}

uint64_t served_changes() {
  return List::get().changes.load();
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

using namespace internal;

std::vector<ServedDelegate> served_delegates(const BlobCache& cache) {
  List& list = List::get();
  const std::lock_guard<std::mutex> guard(list.mutex);
  std::vector<ServedDelegate> found;
  for (const Served* one : list.all) {
    for (const BlobCache* at = one->cache_.get(); at != nullptr; at = at->base().get()) {
      if (at == &cache) {
        found.push_back(one->about_);
        break;
      }
    }
  }
  return found;
}

} // namespace blobstore
