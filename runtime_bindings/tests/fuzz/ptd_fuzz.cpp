// Fuzzes the native reader of .ptd files, and the caches that open them.
#include <algorithm>
#include <cstring>
#include <vector>

#include <blobstore/cache.h>

#include "format/digest.h"
#include "input.h"
#include "mutate.h"

using blobstore::BlobCache;

namespace {

void use(const std::string& path, BlobCache::Mode mode) {
  attempt([&] {
    const auto cache = BlobCache::open({path}, mode);
    attempt([&] { cache->verify(); });
    std::vector<std::vector<uint8_t>> kept;
    std::vector<blobstore::Change> changes;
    for (size_t i = 0; i < cache->size(); ++i) {
      const blobstore::Blob* blob = cache->find(cache->blob(i).key);
      must(blob != nullptr);
      kept.emplace_back(blob->data, blob->data + blob->size);
      changes.push_back({blob->key, kept.back().data(), blob->size, &blob->layout});
    }
    if (!changes.empty()) {
      cache->update(changes);
      cache->revert();
    }
    for (size_t i = 0; i < changes.size(); ++i) {
      const blobstore::Blob* blob = cache->find(changes[i].key);
      // neither a commit of the same bytes nor its revert changes anything
      must(kept[i].empty() || std::memcmp(blob->data, kept[i].data(), kept[i].size()) == 0);
    }
  });
}

template <typename Word>
Word word(const uint8_t* at) {
  Word value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

/// Correct the digests of the head and of the manifest, if they can be found.
void reseal(uint8_t* data, size_t size) {
  constexpr size_t kTail = 32; // the digest, the length, and the magic
  if (size < 96 || std::memcmp(data + size - 8, "BLOBMAN1", 8) != 0) {
    return;
  }
  const uint8_t mark[] = {'B', 'M', '0', '1'};
  const uint8_t* found = std::find_end(data, data + size, mark, mark + 4);
  if (found == data + size || found < data + 4) {
    return;
  }
  const size_t start = static_cast<size_t>(found - data) - 4;
  const size_t end = size - kTail;
  if (end <= start + 8) {
    return;
  }
  const uint64_t base = word<uint64_t>(data + 32);
  const uint64_t root = start + word<uint32_t>(data + start);
  if (root + 4 > size) {
    return;
  }
  const int64_t table = static_cast<int64_t>(root) - word<int32_t>(data + root);
  if (table < 0 || table + 8 > static_cast<int64_t>(size)) {
    return;
  }
  const uint64_t head = word<uint16_t>(data + table + 6);
  if (head != 0 && root + head + 16 <= end && base <= size) {
    const blobstore::internal::Digest sum = blobstore::internal::digest(data, base);
    std::memcpy(data + root + head, sum.data(), sum.size());
  }
  const uint64_t length = end - start;
  std::memcpy(data + size - 16, &length, sizeof length);
  const blobstore::internal::Digest sum = blobstore::internal::digest(data + start, end - start);
  std::memcpy(data + end, sum.data(), sum.size());
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const InputFile file(data, size);
  use(file.path(), BlobCache::Mode::Private);
  use(file.path(), BlobCache::Mode::Copy);
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned int seed) {
  return mutate_sealed(data, size, most, seed, &reseal);
}
