#include "logical/reach.h"

#include <algorithm>
#include <functional>
#include <set>

#include <blobstore/delegate.h>

#include "delegate/served.h"
#include "logical/taken_weights.h"
#include "os/file.h"
#include "os/text.h"
#include "program/loaded_program.h"

namespace blobstore::internal {

constexpr char kTraining[] = "__et_training_";

/// The weights of a program that is loaded on a cache, and where each is.
class LoadedWeights {
 public:
  /// @param path, @param parts, @param cache, @param index, @param keys as for `TakenWeights`.
  /// @param follows whether the program's external tensor of a key changes with the cache.
  LoadedWeights(
      std::string path,
      const ProgramParts* parts,
      const BlobCache& cache,
      const Index& index,
      std::function<bool(const std::string&)> follows,
      const std::vector<std::string>& keys)
      : path_(std::move(path)), parts_(parts), follows_(std::move(follows)), taken_(path_, parts, cache, index, keys) {}

  const TakenWeights& taken() const { return taken_; }

  /// Whether the program trains copies of its own.
  bool trains() const {
    return parts_ != nullptr &&
        std::any_of(parts_->methods.begin(), parts_->methods.end(), [](const std::string& name) {
             return name.rfind(kTraining, 0) == 0;
           });
  }

  void out_of_reach(const std::vector<Shaped>& tensors, bool whole, std::vector<std::string>& problems) const {
    if (!whole && trains()) {
      return;
    }
    std::set<std::string_view> names;
    for (const Shaped& one : tensors) {
      names.insert(one.name);
    }
    find_stale(names, problems);
    find_fixed_weights(path_, parts_, taken_, tensors, whole, problems);
  }

  /// Weights that ExecuTorch's own runtime reads from memory that does not change with the cache.
  void find_stale(const std::set<std::string_view>& given, std::vector<std::string>& problems) const {
    Ordered<NameSet> found;
    for (const auto& [key, method] : taken_.externals()) {
      if (!follows_(key) && is_given(key, given)) {
        found[method][key];
      }
    }
    for (const auto& [method, keys] : found) {
      problems.push_back(format(
          "{}, which ExecuTorch's own runtime has loaded{}, {} {} from a map or a copy of its own: serve a shared "
          "working copy (make_working_copy) and give its path as data_path; a Module also needs LoadMode::Mmap",
          where_in(method, path_),
          parts_ == nullptr ? " into memory" : "",
          parts_ == nullptr ? "may read" : "reads",
          listed(keys)));
    }
  }

  /// Which of the given tensors the program takes from the cache, and which from elsewhere.
  void sort(
      const std::set<std::string_view>& given,
      std::set<std::string_view>& followed,
      std::set<std::string_view>& stale) const {
    for (const std::string_view name : given) {
      if (taken_.in_delegates(name) || taken_.delegated().contains(std::string(name))) {
        followed.insert(name);
      }
    }
    for (const auto& external : taken_.externals()) {
      std::set<std::string_view>& found = follows_(external.first) ? followed : stale;
      for (const std::string_view name : taken_.names_of(external.first)) {
        if (const auto at = given.find(name); at != given.end()) {
          found.insert(*at);
        }
      }
    }
  }

 private:
  bool is_given(const std::string& key, const std::set<std::string_view>& given) const {
    const Names names = taken_.names_of(key);
    return std::any_of(names.begin(), names.end(), [&](std::string_view name) { return given.count(name) != 0; });
  }

  std::string path_;
  const ProgramParts* parts_;
  std::function<bool(const std::string&)> follows_;
  TakenWeights taken_;
};

namespace {

/// A program that ExecuTorch has mapped; null if its path no longer leads to the same file.
std::shared_ptr<const ProgramParts> open_served(const std::string& path, uint64_t inode) {
  try {
    if (path.empty()) {
      return nullptr;
    }
    const File file(path, false);
    if (file.status().inode != inode) {
      return nullptr;
    }
    const uint64_t size = file.size();
    const auto map = std::make_shared<Mapping>(file, 0, size, Mapping::Kind::ReadOnly);
    auto parts = std::make_shared<ProgramParts>(read_program_parts(path, map->data(), size));
    parts->owner = map;
    return parts;
  } catch (const Error&) {
    return nullptr;
  }
}

/// Whether a key belongs to a shared working copy that one of the caches with these ids has mapped.
bool is_shared_in(const BlobCache& cache, const std::set<uint64_t>& ids, const std::string& key) {
  const BlobCache* owner = &cache;
  while (owner != nullptr && !owner->owns(key)) {
    owner = owner->base().get();
  }
  return owner != nullptr && owner->mode() == BlobCache::Mode::Shared && ids.count(owner->id()) != 0;
}

std::vector<std::string> each_once(std::vector<std::string> problems) {
  std::vector<std::string> found;
  for (std::string& problem : problems) {
    if (std::find(found.begin(), found.end(), problem) == found.end()) {
      found.push_back(std::move(problem));
    }
  }
  return found;
}

/// The delegates of one method of one program that ExecuTorch's own runtime has loaded.
struct ServedMethod {
  std::vector<std::string> keys;
  std::set<uint64_t> same;
  std::set<uint64_t> other;
};

} // namespace

void Reach::for_each(
    const BlobCache& cache, const Index& index, const std::function<void(const LoadedWeights& weights)>& visit) {
  for (const std::shared_ptr<const LoadedProgram>& program : programs_on(cache)) {
    const std::shared_ptr<BlobCache>& own = program->cache();
    const std::shared_ptr<const Index> above = own.get() == &cache ? nullptr : index_of(own);
    visit(LoadedWeights(
        program->path(), &program->parts(), *own, above ? *above : index, [](const std::string&) { return true; }, {}));
  }
  std::map<std::tuple<std::string, std::string, uint64_t>, size_t> places;
  std::vector<std::pair<ServedDelegate, ServedMethod>> methods;
  for (const ServedDelegate& one : served_delegates(cache)) {
    const auto [at, is_new] = places.emplace(std::tuple(one.method, one.program, one.inode), methods.size());
    if (is_new) {
      methods.emplace_back(one, ServedMethod());
    }
    ServedMethod& method = methods[at->second].second;
    method.keys.insert(method.keys.end(), one.keys.begin(), one.keys.end());
    method.keys.insert(method.keys.end(), one.others.begin(), one.others.end());
    method.same.insert(one.same_files.begin(), one.same_files.end());
    method.other.insert(one.other_files.begin(), one.other_files.end());
  }
  Files files;
  for (auto& [about, method] : methods) {
    const std::shared_ptr<const ProgramParts>& parts = files[{about.program, about.inode}] =
        served(about.program, about.inode);
    for (const uint64_t id : method.other) {
      method.same.erase(id);
    }
    visit(LoadedWeights(
        parts == nullptr ? format("a program with a method '{}'", about.method) : parts->path,
        parts.get(),
        cache,
        index,
        [&, &same = method.same](const std::string& key) { return is_shared_in(cache, same, key); },
        method.keys));
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  served_ = std::move(files); // drops the programs that are gone
}

std::vector<std::string> Reach::out_of_reach(
    const BlobCache& cache, const Index& index, const std::vector<Shaped>& tensors, bool whole) {
  std::vector<std::string> problems;
  for_each(cache, index, [&](const LoadedWeights& weights) { weights.out_of_reach(tensors, whole, problems); });
  return each_once(std::move(problems));
}

std::optional<NamesInUse> Reach::in_use(const BlobCache& cache, const Index& index, bool serving) {
  std::optional<NamesInUse> names;
  for_each(cache, index, [&](const LoadedWeights& weights) {
    if (serving && weights.trains()) {
      return;
    }
    if (!names) {
      names.emplace();
    }
    weights.taken().add_names(*names);
  });
  return names;
}

std::set<std::string_view> Reach::without_effect(
    const BlobCache& cache,
    const Index& index,
    const std::vector<std::string_view>& names,
    std::vector<std::string>& problems) {
  const uint64_t programs = served_changes() + program_changes(); // first, so that a later one is noticed next time
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (programs == programs_ &&
        std::all_of(names.begin(), names.end(), [&](std::string_view name) { return with_effect_.count(name) != 0; })) {
      return {};
    }
  }
  if (served_delegates(cache).empty()) {
    return {};
  }
  const std::set<std::string_view> given(names.begin(), names.end());
  std::set<std::string_view> followed;
  std::set<std::string_view> stale;
  for_each(cache, index, [&](const LoadedWeights& weights) { weights.sort(given, followed, stale); });
  for (const std::string_view name : followed) {
    stale.erase(name);
  }
  if (!stale.empty()) {
    for_each(cache, index, [&](const LoadedWeights& weights) { weights.find_stale(stale, problems); });
    problems = each_once(std::move(problems));
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  if (programs != programs_) {
    with_effect_.clear();
    programs_ = programs;
  }
  for (const std::string_view name : names) {
    if (stale.count(name) == 0 && (index.find(name) != nullptr || cache.owns(name))) {
      with_effect_.emplace(name);
    }
  }
  return stale;
}

std::shared_ptr<const ProgramParts> Reach::served(const std::string& path, uint64_t inode) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto known = served_.find({path, inode});
    if (known != served_.end() && known->second != nullptr) {
      return known->second;
    }
  }
  return open_served(path, inode);
}

std::shared_ptr<const Index> Reach::index_of(const std::shared_ptr<BlobCache>& cache) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto at = above_.begin(); at != above_.end();) {
      at = at->second->cache.expired() ? above_.erase(at) : std::next(at);
    }
    if (const auto known = above_.find(cache->id()); known != above_.end()) {
      return {known->second, &known->second->index};
    }
  }
  const auto made = std::make_shared<const Above>(cache); // without the lock, because it takes those of the cache
  const std::lock_guard<std::mutex> guard(mutex_);
  above_[cache->id()] = made;
  return {made, &made->index};
}

} // namespace blobstore::internal
