// What is known about programs that ExecuTorch's own runtime loads on a cache: their delegates say it.
#pragma once

#include <memory>
#include <vector>

#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/cache.h>
#include <blobstore/delegate.h>

#include "delegate/delegate_payload.h"

namespace blobstore::internal {

/// Lists a delegate in `served_delegates` as long as it lives.
class Served {
 public:
  /// @param program any address in the program, which need not be mapped; @param map ExecuTorch's, may be null.
  Served(
      std::shared_ptr<const BlobCache> cache,
      std::string method,
      const void* program,
      const executorch::runtime::NamedDataMap* map,
      const std::vector<DelegateConstant>& constants);
  ~Served();
  Served(const Served&) = delete;
  Served& operator=(const Served&) = delete;

 private:
  friend std::vector<ServedDelegate> blobstore::served_delegates(const BlobCache& cache);

  std::shared_ptr<const BlobCache> cache_;
  ServedDelegate about_;
};

} // namespace blobstore::internal
