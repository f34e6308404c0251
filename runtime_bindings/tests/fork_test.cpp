// Forks in the middle of Readings: the child goes on, or gets an error; it never hangs or dies.
//
//   fork_test COPY.ptd [without-descriptors]
//
// COPY.ptd is a working copy with a float tensor "a". The exit code is 77 if the test cannot run in this build.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>

#include <blobstore/cache.h>
#include <blobstore/reading.h>

#include "helpers.h"

namespace {

using blobstore::BlobCache;

/// The builds with AddressSanitizer also have UndefinedBehaviorSanitizer, which opens pipes when an Error is thrown.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kNeedsDescriptors = true;
#else
constexpr bool kNeedsDescriptors = false;
#endif

void set_descriptors(rlim_t most) {
  rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = most;
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

rlim_t descriptors() {
  rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  return limit.rlim_cur;
}

/// Another thread ends Readings of this thread, which forks meanwhile.
void test_readings_that_another_thread_ends(const std::string& path) {
  const auto cache = BlobCache::open({path});
  for (int round = 0; round < 20; ++round) {
    std::vector<std::unique_ptr<BlobCache::Reading>> readings(50'000);
    for (auto& reading : readings) {
      reading = std::make_unique<BlobCache::Reading>(*cache);
    }
    std::atomic<bool> begun{false};
    std::thread other([&] {
      for (auto& reading : readings) {
        reading.reset();
        begun = true;
      }
    });
    while (!begun) {
    }
    CHECK(in_child([&] { const BlobCache::Reading reading(*cache); }));
    other.join();
  }
}

/// In the child, a Reading of a thread that stayed in the parent holds off no commit, and may be destroyed.
void test_reading_of_a_thread_that_stayed(const std::string& path, BlobCache::Mode mode) {
  const auto cache = BlobCache::open({path}, mode);
  std::optional<BlobCache::Reading> reading;
  std::thread([&] { reading.emplace(*cache); }).join();
  CHECK(in_child([&] {
    reading.reset();
    {
      const BlobCache::Reading own(*cache);
    }
    if (mode != BlobCache::Mode::Shared) { // there the parent's Reading holds off commits
      const blobstore::Blob& a = cache->at("a");
      const std::vector<uint8_t> bytes(a.size, 1);
      cache->update({{"a", bytes.data(), bytes.size(), nullptr}});
    }
  }));
}

/// The child has no file descriptors for its own locks: the next Reading is an error, until there are descriptors
/// again.
void test_without_descriptors(const std::string& path) {
  const auto cache = BlobCache::open({path}, BlobCache::Mode::Shared);
  const uint64_t generation = cache->generation();
  const rlim_t before = descriptors();
  auto reading = std::make_unique<BlobCache::Reading>(*cache);
  const auto nested = std::make_unique<BlobCache::Reading>(*cache);
  set_descriptors(0);
  const bool ended = in_child([&] {
    try {
      const BlobCache::Reading again(*cache);
      CHECK(false);
    } catch (const blobstore::Error& error) {
      CHECK(error.kind() == blobstore::ErrorKind::FileAccess);
    }
    reading.reset();
    set_descriptors(before);
    const BlobCache::Reading again(*cache);
    CHECK(cache->generation() == generation);
  });
  set_descriptors(before);
  CHECK(ended);
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    return 64;
  }
  const std::string path = argv[1];
  if (argc == 3) {
    if (kNeedsDescriptors) {
      std::puts("skipped: fork_test without-descriptors: UndefinedBehaviorSanitizer needs descriptors");
      return 77;
    }
    test_without_descriptors(path);
    std::puts("ok");
    return 0;
  }
  test_readings_that_another_thread_ends(path);
  for (const auto mode : {BlobCache::Mode::Private, BlobCache::Mode::Copy, BlobCache::Mode::Shared}) {
    test_reading_of_a_thread_that_stayed(path, mode);
  }
  std::puts("ok");
  return 0;
}
