// Lets each allocation of a commit fail in turn: the commit changes all or nothing, every time.
//
//   memory_test FILE.ptd COPY.ptd
//
// Both have float tensors "a" and "b" of one size; COPY.ptd is a working copy, FILE.ptd has "tied" with the bytes of
// "a".

#include <new>

#include <blobstore/data_map.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

/// How many allocations of this thread will still succeed; negative for all.
thread_local long left = -1;

void* allocate(size_t size) {
  if (left == 0) {
    return nullptr;
  }
  left -= left > 0 ? 1 : 0;
  return std::malloc(size == 0 ? 1 : size);
}

} // namespace

void* operator new(size_t size) {
  if (void* memory = allocate(size)) {
    return memory;
  }
  throw std::bad_alloc();
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return allocate(size);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace {

/// Let the first, the second, ... allocation of some work fail until it succeeds. @returns how often it failed.
template <typename Work, typename Untouched>
int fail_each(Work work, Untouched untouched) {
  for (int failures = 0;; ++failures) {
    left = failures;
    bool failed = false;
    try {
      work();
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    left = -1;
    if (!failed) {
      return failures;
    }
    untouched();
  }
}

void test_commits(const std::string& path, BlobCache::Mode mode) {
  const auto cache = BlobCache::open({path}, mode);
  using Contents = std::vector<std::vector<float>>;
  const auto contents = [&] { return Contents{floats(*cache, "a"), floats(*cache, "b")}; };
  const Contents before = contents();
  const Contents after = {std::vector<float>(before[0].size(), 1), std::vector<float>(before[1].size(), 2)};
  const std::vector<Change> changes = {{"a", after[0]}, {"b", after[1]}};
  const uint64_t generation = cache->generation();
  CHECK(
      fail_each(
          [&] { cache->update(changes); },
          [&] {
            CHECK(contents() == before && cache->generation() == generation);
            CHECK(cache->dirty().empty() && cache->verify());
          }) > 3);
  CHECK(contents() == after && cache->generation() == generation + 1 && cache->dirty().size() == 2);
  if (mode == BlobCache::Mode::Shared) {
    return;
  }
  for (const bool whole : {false, true}) {
    CHECK(
        fail_each(
            [&] { whole ? cache->revert() : cache->revert({"a", "b"}); },
            [&] { CHECK(contents() == after && cache->dirty().size() == 2); }) > 1);
    CHECK(contents() == before && cache->dirty().empty());
    cache->update(changes);
  }
}

/// ExecuTorch gets an error number, because it is compiled without exceptions.
void test_data_map(const std::string& path) {
  using EtError = executorch::runtime::Error;
  const auto cache = BlobCache::open({path});
  const CacheDataMap map(cache);
  std::vector<uint8_t> buffer(cache->at("a").size);
  for (long n = 0; n < 8; ++n) {
    left = n;
    const EtError error = map.get_data("a").error();
    left = n;
    const EtError read = map.load_data_into("a", buffer.data(), buffer.size());
    left = n;
    {
      const CacheDataMap::Misses misses;
      CHECK(map.get_data("a key that is too long for a small string").error() != EtError::Ok);
    }
    left = -1;
    CHECK(error == EtError::Ok || (n == 0 && error == EtError::MemoryAllocationFailed));
    CHECK(read == EtError::Ok || (n < 5 && read == EtError::MemoryAllocationFailed));
  }
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  for (const auto mode : kModes) {
    test_commits(argv[mode == BlobCache::Mode::Shared ? 2 : 1], mode);
  }
  test_data_map(argv[1]);
}
