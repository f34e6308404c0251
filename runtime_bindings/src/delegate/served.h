// What is known about programs that ExecuTorch's own runtime loads on a cache: their delegates say it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/cache.h>
#include <blobstore/delegate.h>

#include "delegate/delegate_payload.h"
#include "delegate/failure.h"

namespace blobstore::internal {

/// Grows with every change of what `served_delegates` lists, of any cache.
uint64_t served_changes();

/// Lists a delegate in `served_delegates` as long as it lives.
class Served {
 public:
  /// @param name the method's name where the program has it; delegates of one loaded method have the same address,
  ///   which stays in use for as long as they live. May be null.
  /// @param program any address in the program, which need not be mapped; @param map ExecuTorch's, may be null.
  Served(
      std::shared_ptr<const BlobCache> cache,
      std::string method,
      const char* name,
      const void* program,
      const et::NamedDataMap* map,
      const std::vector<DelegateConstant>& constants);
  ~Served();
  Served(const Served&) = delete;
  Served& operator=(const Served&) = delete;

 private:
  friend std::vector<ServedDelegate> blobstore::served_delegates(const BlobCache& cache);

  /// Take from another delegate of the method what holds for all of them. A working copy is one file, and ExecuTorch
  /// refuses maps with a key twice, so what holds for one key of a cache holds for all.
  void learn(const Served& other, std::map<const BlobCache*, const DelegateConstant*>& unknown);
  /// Find out the files behind an address in the program (unless null), and behind the caches.
  void look_up(const void* program, const std::map<const BlobCache*, const DelegateConstant*>& unknown);

  std::shared_ptr<const BlobCache> cache_;
  const char* name_;
  const et::NamedDataMap* map_;
  ServedDelegate about_;
};

} // namespace blobstore::internal
