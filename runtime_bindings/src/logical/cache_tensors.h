// The tensors of a model on a cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/tensors.h>

#include "cache/cache_source.h"
#include "logical/reach.h"
#include "logical/updates.h"

namespace blobstore::internal {

/// What `LogicalTensors` and the Python module share. Holds the cache. Any thread may call any function at any time.
class CacheTensors {
 public:
  /// @throws as LogicalTensors.
  explicit CacheTensors(std::shared_ptr<BlobCache> cache);

  const std::shared_ptr<BlobCache>& cache() const { return cache_; }
  const Updates& updates() const { return updates_; }

  /// @throws Error Update: also if nothing that is loaded takes one of the tensors from here, and something from a
  ///   copy of its own.
  /// @param strict refuse if more than one in a thousand numbers of a tensor would be clipped.
  Updated update(const std::vector<Given>& given, bool finite, bool strict = false) const;
  Updated update_state_dict(const std::vector<Given>& given, bool strict, bool finite) const;
  /// The entries of a state dict to update; see `Updates::choose`. With `strict`, those of loaded programs must be
  /// there.
  Names choose(const std::vector<Entry>& entries, bool strict) const;
  /// The same with their values.
  std::vector<Given> choose(const std::vector<Given>& entries, bool strict) const;
  /// @throws Error Update: loaded programs have weights that an update of these tensors does not reach.
  /// @param whole whether the tensors are a whole model's; see reach.h.
  void check_reach(const std::vector<Shaped>& tensors, bool whole) const;
  void check_reach(const std::vector<Given>& tensors, bool whole) const;
  /// Those of some names of tensors or keys that nothing takes which serves: neither a blob of a delegate nor, if
  /// programs are loaded that do not train, one of these. While none is loaded, keys count unless there is a tensor of
  /// a similar name.
  Names without_takers(const Names& names) const;

 private:
  /// @param every whether only an update without any effect is refused.
  void check_effect(const std::vector<Given>& given, bool every) const;
  Updated commit(const std::vector<Given>& given, bool finite, bool strict) const;
  /// @throws Error Update: there are problems.
  void refuse(const std::vector<std::string>& problems) const;

  std::shared_ptr<BlobCache> cache_;
  CacheSource source_;
  Updates updates_;
  mutable Reach reach_;
};

/// Lets other rooms see what is behind the public class.
struct TensorsAccess {
  static const CacheTensors& of(const LogicalTensors& tensors);
};

} // namespace blobstore::internal
