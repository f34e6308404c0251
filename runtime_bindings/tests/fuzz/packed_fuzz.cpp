// Fuzzes the reader of files of packed weights, and the maps in them.
#include <cstring>
#include <vector>

#include "format/digest.h"
#include "input.h"
#include "mutate.h"
#include "packed/packed_file.h"

namespace {

using namespace blobstore::internal; // NOLINT: all that is tested is in there

constexpr size_t kTail = 60; // trailer and footer
constexpr size_t kMost = size_t{1} << 20; // bytes that a map of so small a file may give

/// The sizes of weights, biases and scales of the seeds. A map is applied to those that it fits.
const std::vector<std::vector<size_t>> kSizes = {
    {16 * 24 * 4, 24 * 4}, {24 * 24 * 4, 24 * 4}, {24 * 8 * 4, 8 * 4}, {8 * 6, 6 * 4, 6 * 4}, {6 * 6, 6 * 4, 6 * 4}};

void apply(const PackedMap& map) {
  for (const std::vector<size_t>& sizes : kSizes) {
    if (map.size() > kMost || !map.fits(sizes, map.size())) {
      continue;
    }
    std::vector<std::vector<uint8_t>> bytes;
    PackedSources sources;
    for (const size_t size : sizes) {
      sources.push_back({bytes.emplace_back(size, uint8_t{1}).data(), size});
    }
    std::vector<uint8_t> packed(map.size());
    map.apply(sources, packed.data());
    must(map.gives(sources, packed.data(), packed.size()));
  }
  const std::string text = map.encode();
  const auto again = PackedMap::decode(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  must(again && again->encode() == text);
}

/// Correct the digest of the table, if it can be found.
void reseal(uint8_t* data, size_t size) {
  uint64_t start = 0;
  if (size < kTail) {
    return;
  }
  std::memcpy(&start, data + size - kTail, sizeof start);
  if (start > size - kTail) {
    return;
  }
  const Digest sum = digest(data + start, size - kTail - start);
  std::memcpy(data + size - kTail + 16, sum.data(), sum.size());
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attempt([&] { (void)read_stock_entries("fuzz", data, size); });
  attempt([&] {
    const PackedTable table = read_packed_table("fuzz", data, size);
    for (const PackedMap& map : table.maps) {
      apply(map);
    }
    for (const PackedEntry& entry : table.entries) {
      must(entry.size <= size && entry.offset <= size - entry.size && entry.map <= table.maps.size());
    }
    verify_packed("fuzz", data, table);
  });
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned int seed) {
  return mutate_sealed(data, size, most, seed, &reseal);
}
