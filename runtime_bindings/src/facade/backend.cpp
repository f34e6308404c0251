// What libblobstore_backend.so has beside the delegate: its registration, and functions for C.
#pragma GCC visibility push(default) // of these functions alone
#include <blobstore_backend.h>
#pragma GCC visibility pop

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/delegate.h>

#include "delegate/offers.h"
#include "facade/attempt.h"

struct blobstore_weights {
  std::shared_ptr<blobstore::BlobCache> cache;
};

namespace {

using blobstore::BlobCache;
using blobstore::ErrorKind;

constexpr int code(ErrorKind kind) {
  return static_cast<int>(kind) + 1;
}
static_assert(code(ErrorKind::InvalidFile) == BLOBSTORE_INVALID_FILE);
static_assert(code(ErrorKind::Integrity) == BLOBSTORE_INTEGRITY);
static_assert(code(ErrorKind::FileAccess) == BLOBSTORE_FILE_ACCESS);
static_assert(code(ErrorKind::KeyNotFound) == BLOBSTORE_KEY_NOT_FOUND);
static_assert(code(ErrorKind::KeyConflict) == BLOBSTORE_KEY_CONFLICT);
static_assert(code(ErrorKind::Layout) == BLOBSTORE_LAYOUT);
static_assert(code(ErrorKind::Unsupported) == BLOBSTORE_UNSUPPORTED);
static_assert(code(ErrorKind::Program) == BLOBSTORE_PROGRAM);

// Errors are copied without allocating memory, which may be what is missing.
thread_local blobstore::Result<void> last;
thread_local std::string delegate_error;

template <typename Function>
int call(Function&& function) noexcept {
  blobstore::Result<void> done = blobstore::internal::attempt(std::forward<Function>(function));
  if (done.ok()) {
    return BLOBSTORE_OK;
  }
  last = std::move(done);
  return code(last.error().kind());
}

int open(const std::vector<std::string>& paths, BlobCache::Mode mode, blobstore_weights** weights) {
  *weights = nullptr;
  return call([&] {
    auto opened = std::make_unique<blobstore_weights>();
    opened->cache = BlobCache::open(paths, mode);
    blobstore::internal::offer(opened->cache);
    *weights = opened.release();
  });
}

[[maybe_unused]] const bool registered = (blobstore::register_delegate(), true); // when the library is loaded

} // namespace

int blobstore_open(const char* const* paths, size_t count, blobstore_weights** weights) {
  return open({paths, paths + count}, BlobCache::Mode::Private, weights);
}

int blobstore_open_working_copy(const char* path, blobstore_weights** weights) {
  return open({path}, BlobCache::Mode::Shared, weights);
}

int blobstore_make_working_copy(const char* const* paths, size_t count, const char* target) {
  return call([&] { blobstore::make_working_copy({paths, paths + count}, target); });
}

void blobstore_close(blobstore_weights* weights) {
  if (weights != nullptr) {
    blobstore::internal::withdraw(*weights->cache);
    delete weights;
  }
}

int blobstore_update(blobstore_weights* weights, const char* delta) {
  return call([&] { weights->cache->load(delta); });
}

int blobstore_revert(blobstore_weights* weights) {
  return call([&] { weights->cache->revert(); });
}

uint64_t blobstore_generation(const blobstore_weights* weights) {
  return weights->cache->generation();
}

size_t blobstore_followers(const blobstore_weights* weights) {
  size_t count = 0;
  (void)call([&] { count = blobstore::served_delegates(*weights->cache).size(); });
  return count;
}

const char* blobstore_error() {
  return last.ok() ? "" : last.error().what();
}

const char* blobstore_delegate_error() {
  const auto failure = blobstore::take_delegate_failure();
  delegate_error = failure ? failure->reason : std::string();
  return delegate_error.c_str();
}
