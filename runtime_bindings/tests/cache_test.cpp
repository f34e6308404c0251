// Exercises the cache from several threads; sanitizers judge.
//
//   cache_test FILE.ptd FOLDER
//
// FILE.ptd has float tensors "a" and "b" of one size, "tied" with the bytes of "a", and opaque bytes "opaque". FOLDER
// has copy.ptd, a working copy of it.

#include <blobstore/commit_follower.h>
#include <blobstore/data_map.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

bool uniform(const BlobCache& cache, const char* key) {
  const std::vector<float> numbers = floats(cache, key);
  return std::count(numbers.begin(), numbers.end(), numbers[0]) == static_cast<std::ptrdiff_t>(numbers.size());
}

void commit(BlobCache& cache, float value) {
  cache.update({filled(cache, {"a"}, value)[0], filled(cache, {"b"}, -value)[0]});
}

void test_threads(const std::string& path, BlobCache::Mode mode) {
  const auto cache = BlobCache::open({path}, mode);
  commit(*cache, 1);
  const CacheDataMap map(cache);
  {
    const auto read = [&](int) {
      const BlobCache::Reading reading(*cache);
      const BlobCache::Reading again(*cache);
      CHECK(uniform(*cache, "a") && uniform(*cache, "b") && first(*cache, "a") == -first(*cache, "b"));
    };
    const Repeating one(read);
    const Repeating two(read);
    const Repeating three(read);
    const Repeating maps([&](int) { // tests/runtime/test_data_map.py has what else it says
      CHECK(map.get_data("opaque").ok() && !map.get_data("none").ok());
      std::vector<uint8_t> buffer(cache->at("a").size);
      CHECK(map.load_data_into("a", buffer.data(), buffer.size()) == executorch::runtime::Error::Ok);
      cache->stats();
      cache->dirty();
    });
    for (int n = 1; n < 40; ++n) {
      commit(*cache, static_cast<float>(n));
      if (mode != BlobCache::Mode::Shared && n % 7 == 0) {
        cache->revert({"tied"});
      }
    }
  }
  if (mode != BlobCache::Mode::Shared) {
    cache->revert({"a"});
    cache->revert();
    CHECK(cache->dirty().empty());
    CHECK(cache->verify());
  }
  CHECK(cache->generation() >= 40);
}

/// Rewrites a file in place and truncates it while a commit is prepared.
struct Rewriter final : CommitFollower {
  Rewriter(std::string path, size_t size) : path(std::move(path)), size(size) {}
  std::unique_ptr<Prepared> prepare(const StagedCommit&) override {
    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out) << std::string(size, '\x7f');
    CHECK(truncate(path.c_str(), 1) == 0);
    ++times;
    return nullptr;
  }
  std::string path;
  size_t size;
  int times = 0;
};

/// What is loaded is what was verified, whatever happens to the file afterwards.
void test_loading_a_file_that_is_rewritten(const std::string& path, const std::string& open, BlobCache::Mode mode) {
  const std::string loaded = open + ".loaded";
  const std::string bytes = read(path);
  write(loaded, bytes);
  const auto cache = BlobCache::open({open}, mode);
  commit(*cache, 5);
  const auto rewriter = std::make_shared<Rewriter>(loaded, bytes.size());
  cache->follow(rewriter);
  cache->load(loaded);
  CHECK(rewriter->times == 1);
  for (const char* key : {"a", "b", "tied"}) {
    CHECK(uniform(*cache, key) && first(*cache, key) == (*key == 'b' ? 1 : 0));
  }
  CHECK(cache->at("opaque").size == 100);
  for (size_t i = 0; i < 100; ++i) {
    CHECK(cache->at("opaque").data[i] == i);
  }
}

/// A change may hold its bytes, so that nothing else has to.
void test_changes(const std::string& path) {
  using executorch::extension::full;
  const auto cache = BlobCache::open({path});
  const auto length = static_cast<int32_t>(cache->at("a").size / sizeof(float));
  std::vector<Change> changes;
  {
    auto tensor = full({length}, 3.0f);
    changes.emplace_back("a", tensor);
    changes.emplace_back("b", std::vector<float>(static_cast<size_t>(length), 4));
    changes.emplace_back("opaque", std::vector<uint8_t>(100, 5));
  }
  const std::vector<Change> copy = changes;
  changes.clear();
  CHECK(cache->update(copy) == 1);
  CHECK(uniform(*cache, "a") && first(*cache, "a") == 3 && uniform(*cache, "b") && first(*cache, "b") == 4);
  CHECK(cache->at("opaque").data[99] == 5);
  CHECK(cache->update({{"a", full({length}, 6.0f)}}) == 2 && first(*cache, "a") == 6);

  using executorch::aten::ScalarType;
  for (const auto& empty :
       {executorch::extension::TensorPtr(), executorch::extension::make_tensor_ptr({length}, nullptr)}) {
    CHECK(fails(ErrorKind::UnsupportedData, [&] { const Change change("a", empty); }));
  }
  const std::pair<ErrorKind, Change> refused[] = {
      {ErrorKind::Layout, {"a", full({length / 2, 2}, 7.0f)}},
      {ErrorKind::Layout, {"a", full({length}, 7, ScalarType::Int)}},
      {ErrorKind::Layout, {"a", std::vector<float>(3)}},
      {ErrorKind::Layout, {"opaque", full({100}, 1, ScalarType::Byte)}},
      {ErrorKind::KeyNotFound, {"c", std::vector<float>(3)}},
  };
  for (const auto& [kind, change] : refused) {
    CHECK(kind_of_error([&, &one = change] { cache->update({one}); }) == kind);
  }
  CHECK(cache->generation() == 2 && first(*cache, "a") == 6);
}

/// Several files are one commit; two that contradict each other are none.
void test_loading_several_files(const std::string& path, const std::string& folder) {
  const auto cache = BlobCache::open({path});
  const auto delta = [&](const std::string& name, const std::string& key, float value) {
    const auto other = BlobCache::open({path});
    other->update(filled(*other, {key}, value));
    other->save(folder + "/" + name, /*dirty_only=*/true);
    return folder + "/" + name;
  };
  const std::string a = delta("a.ptd", "a", 7);
  const std::string b = delta("b.ptd", "b", 8);
  const std::string other = delta("other.ptd", "a", 9);
  CHECK(cache->load_all({}) == 0 && cache->load_all({a, b, a}) == 1);
  CHECK(first(*cache, "a") == 7 && first(*cache, "b") == 8);
  CHECK(fails(ErrorKind::KeyConflict, [&] { cache->load_all({a, other}); }));
  CHECK(fails(ErrorKind::FileAccess, [&] { cache->load_all({other, folder + "/nowhere.ptd"}); }));
  CHECK(cache->generation() == 1 && first(*cache, "a") == 7);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  const std::string path = argv[1];
  const std::string folder = argv[2];
  for (const auto mode : kModes) {
    const std::string open = mode == BlobCache::Mode::Shared ? folder + "/copy.ptd" : path;
    test_threads(open, mode);
    test_loading_a_file_that_is_rewritten(path, open, mode);
  }
  test_changes(path);
  test_loading_several_files(path, folder);
}
