// Which weights of loaded programs an update by name does not reach, because the programs do not take them from the
// cache.
//
// A program may contain weights, as constants or for its delegates; another backend may have packed them; ExecuTorch's
// own runtime may read them from its own map of the data file. An update changes none of these, so an update that must
// change all weights is refused. A constant in a program has no name, so it is recognized by its dtype and shape.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/cache.h>

#include "cache/cache_source.h"
#include "logical/fixed_weights.h"
#include "logical/index.h"
#include "logical/updates.h"
#include "os/fork.h"
#include "program/program_parts.h"

namespace blobstore::internal {

class LoadedWeights;

/// What is known about the programs on a cache and on caches above it. Any thread may call it.
class Reach : private ForkAware {
 public:
  Reach() { enter(); }
  ~Reach() override { leave(); }
  Reach(const Reach&) = delete;
  Reach& operator=(const Reach&) = delete;

  /// The weights of the programs that are loaded now which an update by name does not change.
  ///
  /// @param index of `cache`.
  /// @param whole whether the tensors are a whole model's. Then all weights that are out of reach count; otherwise only
  ///   weights that may be one of the tensors.
  /// @returns for each kind of such weights a clause that names the program, the method, the weights if known, and the
  ///   remedy.
  /// @throws Error InvalidFile: a program, or a record in it, is damaged.
  std::vector<std::string> out_of_reach(
      const BlobCache& cache, const Index& index, const std::vector<Shaped>& tensors, bool whole);

  /// The names of the tensors that the programs which are loaded now have; nothing while none is loaded.
  ///
  /// @param serving whether programs that train their own copies do not count.
  /// @throws as `out_of_reach`.
  std::optional<NamesInUse> in_use(const BlobCache& cache, const Index& index, bool serving);

  /// Those of the tensors that ExecuTorch's own runtime reads from memory of its own while nothing that is loaded takes
  /// them from the cache: an update of these would have no effect.
  ///
  /// @param problems gets a clause as of `out_of_reach` for each method that reads them.
  /// @throws as `out_of_reach`.
  std::set<std::string_view> without_effect(
      const BlobCache& cache,
      const Index& index,
      const std::vector<std::string_view>& names,
      std::vector<std::string>& problems);

 private:
  /// The records of a cache above. It refers to the cache, which programs hold while it is used.
  struct Above {
    explicit Above(const std::shared_ptr<BlobCache>& of) : cache(of), source(*of), index(source) {}
    std::weak_ptr<BlobCache> cache;
    CacheSource source;
    Index index;
  };
  /// Call a function with the weights of each program that is loaded on the cache or on a cache above it.
  void for_each(
      const BlobCache& cache, const Index& index, const std::function<void(const LoadedWeights& weights)>& visit);

  using Files = std::map<std::pair<std::string, uint64_t>, std::shared_ptr<const ProgramParts>>; // by path and inode

  std::shared_ptr<const Index> index_of(const std::shared_ptr<BlobCache>& cache);
  std::shared_ptr<const ProgramParts> served(const std::string& path, uint64_t inode);
  void before_fork() override { mutex_.lock(); }
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override { renew(mutex_); }

  std::mutex mutex_; // guards what follows; taken last
  std::map<uint64_t, std::shared_ptr<const Above>> above_; // by id
  Files served_;
  uint64_t programs_ = 0; // when with_effect_ was filled: as long as the same programs are loaded
  std::set<std::string, std::less<>> with_effect_; // names that `without_effect` did not return
};

} // namespace blobstore::internal
