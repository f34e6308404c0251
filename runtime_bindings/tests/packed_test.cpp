// Packed weights in files, and updates that write them in place, for one process or for all that share a working copy.
//
//   packed_test PROGRAM DATA
//
// The program takes float[1, 300] and runs three linear layers in a delegate.

#include <filesystem>

#include <blobstore/commit_follower.h>
#include <blobstore/delegate.h>
#include <blobstore/packed.h>
#include <blobstore/program.h>

#include "helpers.h"
#include "packed/packed_map.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

std::string program_path;
std::string data_path;
const std::string kFolder = "packed";

struct Running {
  explicit Running(
      std::shared_ptr<PackedStore> packed,
      const std::string& path = data_path,
      BlobCache::Mode mode = BlobCache::Mode::Private)
      : cache(BlobCache::open({path}, mode, nullptr, std::move(packed))),
        method(Program::load(program_path, cache)->load_method("forward")) {}

  std::vector<float> operator()() const {
    const std::vector<float> input(300, 0.5f);
    return numbers(*method->execute({executorch::extension::make_tensor_ptr({1, 300}, input)}).tensor(0));
  }

  /// Give all tensors, or those whose key has a text in it, other values.
  void update(float factor, const char* part = "") const {
    std::vector<Change> changes;
    for (size_t i = 0; i < cache->size(); ++i) {
      const Blob& blob = cache->blob(i);
      if (blob.key.find('@') != std::string::npos && blob.key.find(part) != std::string::npos) {
        std::vector<float> made(blob.size / 4);
        for (size_t j = 0; j < made.size(); ++j) {
          made[j] = factor * static_cast<float>(j % 97) / 97;
        }
        changes.emplace_back(blob.key, std::move(made));
      }
    }
    CHECK(!changes.empty());
    cache->update(changes);
  }

  std::shared_ptr<BlobCache> cache;
  std::shared_ptr<Method> method;
};

void put(std::vector<uint8_t>& packed, const std::vector<uint8_t>& source, size_t word) {
  packed.insert(packed.end(), source.data() + 4 * word, source.data() + 4 * word + 4);
}

/// A kernel that takes the words of four columns in another order for each row, as those for SSE and AVX2 do: the map
/// has few runs, whatever the shape, and gives the packed words.
void shuffled_words() {
  constexpr size_t kLanes = 8;
  constexpr size_t kColumns = 4;
  for (const size_t blocks : {2, 8, 32}) {
    const size_t rows = kLanes * blocks;
    const size_t columns = kColumns * blocks;
    const auto pack = [&](const std::vector<std::vector<uint8_t>>& sources) {
      std::vector<uint8_t> packed;
      for (size_t row = 0; row < rows; row += kLanes) {
        for (size_t lane = 0; lane < kLanes; ++lane) {
          put(packed, sources[1], row + lane);
        }
        for (size_t i = 0; i < columns * kLanes; ++i) {
          const size_t lane = i % kLanes;
          const size_t column = i / (kColumns * kLanes) * kColumns + (i / kLanes + lane) % kColumns;
          put(packed, sources[0], (row + lane) * columns + column);
        }
      }
      return std::optional(packed);
    };
    const auto map = internal::PackedMap::learn({4 * rows * columns, 4 * rows}, pack);
    CHECK(map.has_value() && map->size() == 4 * rows * (columns + 1)); // it was proved with other numbers
    CHECK(map->encode().size() <= 4096);
  }
}

/// Changes of any sources are packed as a kernel packs all of them.
void changes_are_packed(
    const internal::PackedMap& map, const internal::PackedMap::Pack& pack, const std::vector<size_t>& sizes) {
  std::vector<std::vector<uint8_t>> contents(sizes.begin(), sizes.end());
  std::vector<uint8_t> packed(map.size()); // malloc aligns it
  internal::TestNumbers numbers;
  for (const auto& changed : std::vector<std::vector<bool>>{{true, true}, {true, false}, {false, true}}) {
    internal::PackedSources sources;
    for (size_t source = 0; source < contents.size(); ++source) {
      if (changed[source]) {
        numbers.fill(contents[source], /*negative=*/true);
      }
      sources.push_back({contents[source].data(), contents[source].size()});
    }
    map.update(sources, changed, packed.data());
    CHECK(packed == *pack(contents));
  }
}

/// A kernel that takes rows in groups, whose words lie column by column, behind a header. Large weights are streamed,
/// where a column of a group has whole stores and lies right; what changed is the same either way.
void groups_of_rows(size_t columns, size_t lanes, size_t header) {
  constexpr size_t kRows = 512;
  const auto pack = [&](const std::vector<std::vector<uint8_t>>& sources) {
    std::vector<uint8_t> packed(4 * header);
    for (size_t row = 0; row < kRows; row += lanes) {
      for (size_t lane = 0; lane < lanes; ++lane) {
        put(packed, sources[1], row + lane);
      }
      for (size_t i = 0; i < columns * lanes; ++i) {
        put(packed, sources[0], (row + i % lanes) * columns + i / lanes);
      }
    }
    return std::optional(packed);
  };
  const std::vector<size_t> sizes = {4 * kRows * columns, 4 * kRows};
  const auto map = internal::PackedMap::learn(sizes, pack);
  CHECK(map.has_value());
  changes_are_packed(*map, pack, sizes);
}

/// Kernels for int8 have the sum of each row, negative or, as Arm's, as it is.
void sums_of_rows() {
  constexpr size_t kRows = 8;
  constexpr size_t kColumns = 300;
  for (const int32_t sign : {-1, 1}) {
    const auto pack = [&](const std::vector<std::vector<uint8_t>>& sources) {
      std::vector<uint8_t> packed = sources[0];
      for (size_t row = 0; row < kRows; ++row) {
        int32_t sum = 0;
        for (size_t column = 0; column < kColumns; ++column) {
          sum += sign * static_cast<int8_t>(sources[0][row * kColumns + column]);
        }
        packed.resize(packed.size() + 4);
        std::memcpy(packed.data() + packed.size() - 4, &sum, 4);
      }
      packed.insert(packed.end(), sources[2].begin(), sources[2].end()); // scales
      packed.insert(packed.end(), sources[1].begin(), sources[1].end()); // biases
      return std::optional(packed);
    };
    const auto map = internal::PackedMap::learn({kRows * kColumns, 4 * kRows, 4 * kRows}, pack);
    CHECK(map.has_value() && map->has_scales()); // it was proved with other numbers
    const std::string encoded = map->encode();
    const auto again = internal::PackedMap::decode(reinterpret_cast<const uint8_t*>(encoded.data()), encoded.size());
    CHECK(again.has_value() && again->fits({kRows * kColumns, 4 * kRows, 4 * kRows}, map->size()));
  }
}

/// Every state of the weights gives the outputs that it gives without a store.
void equal_outputs() {
  const Running plain(nullptr);
  const auto store = PackedStore::open(kFolder);
  const Running packed(store);
  CHECK(store->stats().builds == 1 && store->stats().hits == 1 && store->stats().fallbacks == 0);
  const auto before = plain();
  CHECK(packed() == before);
  const uint64_t inits = delegate_stats().inits;
  for (const char* part : {"", "weight", "bias", "0."}) {
    packed.update(0.25f, part);
    packed.update(0.5f, part);
    plain.update(0.5f, part);
    CHECK(packed() == plain() && packed() != before);
  }
  const uint64_t by_plain = delegate_stats().inits - inits;
  CHECK(by_plain == 4 || store->stats().written == 0); // those of the other program; Linux writes in place
  packed.cache->revert();
  plain.cache->revert();
  CHECK(packed() == before);
  const Running second(PackedStore::open(kFolder));
  packed.update(0.5f);
  CHECK(second() == before && packed() != before); // a cache of its own
  const Running late(store);
  CHECK(late() == before);
}

/// Threads run while another updates: each output is that of one generation.
void threads() {
  const Running packed(PackedStore::open(kFolder));
  const Running twin(nullptr);
  const auto first = twin();
  twin.update(0.5f);
  const auto second = twin();
  {
    const auto run = [&](int) {
      const auto found = packed();
      CHECK(found == first || found == second);
    };
    const Repeating one(run);
    const Repeating other(run);
    for (int i = 0; i < 20; ++i) {
      packed.update(0.5f);
      packed.cache->revert();
    }
  }
  CHECK(packed() == first);
}

/// Two caches on a working copy, as in two processes: commits of one reach both, while threads run, and nothing is
/// packed.
void working_copy() {
  const std::string path = "live.ptd";
  make_working_copy({data_path}, path);
  const auto shared = BlobCache::Mode::Shared;
  const auto store = PackedStore::open(kFolder);
  const Running plain(nullptr, path, shared);
  const Running first(store, path, shared);
  const Running second(store, path, shared);
  const Running without(nullptr, path, shared);
  CHECK(first() == plain() && second() == plain());
  CHECK(store->stats().builds == 1 && store->stats().fallbacks == 0);
  std::vector<std::vector<float>> outputs;
  for (const float factor : {0.25f, 0.5f}) {
    first.update(factor);
    outputs.push_back(plain());
    const uint64_t inits = delegate_stats().inits;
    CHECK(first() == outputs.back() && second() == outputs.back());
    CHECK(delegate_stats().inits == inits);
  }
  CHECK(outputs[0] != outputs[1]);
  {
    const auto run = [&](const Running& running) {
      const auto found = running();
      CHECK(found == outputs[0] || found == outputs[1]);
    };
    const Repeating of_first([&](int) { run(first); });
    const Repeating of_second([&](int) { run(second); });
    for (int i = 0; i < 20; ++i) {
      (i % 2 == 0 ? first : without).update(0.25f); // the one without a store leaves the packed weights to others
      second.update(0.5f);
    }
  }
  CHECK(first() == outputs[1] && second() == outputs[1] && plain() == outputs[1]);
  CHECK(store->stats().repacked == 0);
}

/// Changes what is committed while it is committed: after it was hashed, and before it is written.
struct Scribble final : CommitFollower {
  std::unique_ptr<Prepared> prepare(const StagedCommit&) override {
    std::fill(values.begin(), values.end(), last);
    return nullptr;
  }
  std::vector<float> values;
  float last = 0;
};

/// What packed weights are made of is what was read, not what the working copy recorded of it.
void changed_during_a_commit() {
  const std::string path = "changed.ptd";
  make_working_copy({data_path}, path);
  const auto store = PackedStore::open(kFolder);
  const Running packed(store, path, BlobCache::Mode::Shared);
  const Running plain(nullptr, path, BlobCache::Mode::Shared);
  CHECK(packed() == plain() && store->stats().fallbacks == 0);
  const BlobCache& cache = *packed.cache;
  const Blob* blob = nullptr;
  for (size_t i = 0; i < cache.size(); ++i) {
    if (cache.blob(i).key.find("weight@") != std::string_view::npos) {
      blob = &cache.blob(i);
    }
  }
  CHECK(blob != nullptr);
  const auto scribble = std::make_shared<Scribble>();
  cache.follow(scribble);
  const auto update = [&](float first, float last) {
    scribble->values.assign(blob->size / 4, first);
    scribble->last = last;
    Change change(std::string(blob->key), scribble->values.data(), blob->size);
    packed.cache->update({change});
  };
  update(0.5f, 0.25f);
  CHECK(packed() == plain());
  CHECK(fails(ErrorKind::Integrity, [&] { cache.verify(); })); // the copy records the digest of what was given
  const std::vector<float> quarter = packed();
  update(0.5f, 0.5f); // of which the copy records the same digest
  CHECK(packed() == plain() && packed() != quarter);
  CHECK(cache.verify());
  for (const PackedFile& file : store->verify()) {
    CHECK(file.problem.empty());
  }
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3);
  program_path = argv[1];
  data_path = argv[2];
  std::filesystem::remove_all(kFolder);
  shuffled_words();
  for (const size_t columns : {520, 523}) { // in words: more than 1 MiB
    for (const size_t lanes : {2, 4, 8, 16, 32, 64, 128}) {
      for (const size_t header : {0, 1, 4}) {
        groups_of_rows(columns, lanes, header);
      }
    }
  }
  sums_of_rows();
  equal_outputs();
  threads();
  working_copy();
  changed_during_a_commit();
}
