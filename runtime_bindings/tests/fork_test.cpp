// Forks in the middle of Readings: the child goes on, or gets an error; it never hangs or dies.
//
//   fork_test COPY.ptd [without-descriptors]
//
// COPY.ptd is a working copy with a float tensor "a". The exit code is 77 if the test cannot run in this build.

#include <sys/resource.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

/// The builds with AddressSanitizer also have UndefinedBehaviorSanitizer, which opens pipes when an Error is thrown.
#ifdef __SANITIZE_ADDRESS__
constexpr bool kNeedsDescriptors = true;
#else
constexpr bool kNeedsDescriptors = false;
#endif

/// Permit so many descriptors. @returns how many were permitted before.
rlim_t set_descriptors(rlim_t most) {
  rlimit limit;
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  std::swap(limit.rlim_cur, most);
  CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  return most;
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
      cache->update(filled(*cache, {"a"}, 1));
    }
  }));
}

/// The child has no file descriptors for its own locks: the next Reading is an error, until there are descriptors
/// again.
void test_without_descriptors(const std::string& path) {
  const auto cache = BlobCache::open({path}, BlobCache::Mode::Shared);
  const uint64_t generation = cache->generation();
  auto reading = std::make_unique<BlobCache::Reading>(*cache);
  const auto nested = std::make_unique<BlobCache::Reading>(*cache);
  const rlim_t before = set_descriptors(0);
  const bool ended = in_child([&] {
    CHECK(fails(ErrorKind::FileAccess, [&] { const BlobCache::Reading again(*cache); }));
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
  CHECK(argc == 2 || argc == 3);
  const std::string path = argv[1];
  if (argc == 3) {
    if (kNeedsDescriptors) {
      std::puts("skipped: fork_test without-descriptors: UndefinedBehaviorSanitizer needs descriptors");
      return 77;
    }
    test_without_descriptors(path);
    return 0;
  }
  test_readings_that_another_thread_ends(path);
  for (const auto mode : kModes) {
    test_reading_of_a_thread_that_stayed(path, mode);
  }
}
