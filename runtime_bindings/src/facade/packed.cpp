#include <blobstore/nothrow.h>

#include "facade/attempt.h"

namespace blobstore BLOBSTORE_API {
namespace nothrow {

using internal::attempt;

Result<std::shared_ptr<PackedStore>> open_packed(const std::string& folder, const PackedOptions& options) noexcept {
  return attempt([&] { return PackedStore::open(folder, options); });
}

Result<PackedStats> stats(const PackedStore& store) noexcept {
  return attempt([&] { return store.stats(); });
}

Result<std::vector<PackedFile>> list(const PackedStore& store) noexcept {
  return attempt([&] { return store.list(); });
}

Result<std::vector<PackedFile>> verify(const PackedStore& store) noexcept {
  return attempt([&] { return store.verify(); });
}

Result<std::vector<PackedFile>> gc(const PackedStore& store) noexcept {
  return attempt([&] { return store.gc(); });
}

} // namespace nothrow
} // namespace blobstore
