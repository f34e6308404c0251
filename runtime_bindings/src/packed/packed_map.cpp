#include "packed/packed_map.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include "os/streaming.h"
#include "os/unaligned.h"
#include "packed/coding.h"

namespace blobstore::internal {
namespace {

constexpr size_t kMostDims = 6;
constexpr size_t kMostSources = 8;
constexpr size_t kMostNests = 4096; // a longer map would not be compact
constexpr size_t kLongestGroup = 32; // nests that are repeated together
constexpr uint64_t kTile = 16;
constexpr uint64_t kMostRows = 64; // of a tile that is streamed
constexpr uint64_t kAhead = 128; // bytes in which a row goes on, fetched while a tile is written: rows lie pages apart

constexpr uint64_t kPerSource = uint64_t{1} << 20; // numbers for each source beside the weight
constexpr uint64_t kMostWord = (uint64_t{1} << 24) - 2; // floats count exactly up to 2**24

/// Give each word of a weight a number: a digit of its index, plus 1.
void number_weight(std::vector<uint8_t>& bytes, uint64_t divisor) {
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    store(bytes.data() + 4 * i, static_cast<float>(i / divisor % kMostWord + 1));
  }
}

/// Give each word of the sources beside the weight a number of its own.
void number_others(std::vector<std::vector<uint8_t>>& sources, float sign) {
  for (size_t source = 1; source < sources.size(); ++source) {
    for (size_t i = 0; i < sources[source].size() / 4; ++i) {
      store(sources[source].data() + 4 * i, sign * static_cast<float>((source - 1) * kPerSource + i + 1));
    }
  }
}

/// Whether the sources beside the weight can have such numbers.
bool can_be_numbered(const std::vector<size_t>& sizes) {
  return sizes.size() > 1 && sizes.size() <= kMostSources &&
      std::all_of(sizes.begin() + 1, sizes.end(), [](size_t size) { return size % 4 == 0 && size / 4 <= kPerSource; });
}

/// What a word holds: its number, 0 for zero; empty for anything else.
std::optional<int64_t> number_of(const uint8_t* word) {
  const auto value = load<float>(word);
  const auto most = static_cast<float>(kMostWord);
  const bool in_range = value >= -most && value <= most; // not if it is NaN
  if (!in_range || value != static_cast<float>(static_cast<int64_t>(value))) {
    return std::nullopt;
  }
  return static_cast<int64_t>(value);
}

} // namespace

/// An element of the packed bytes, and where it comes from.
struct PackedMap::Element {
  uint64_t to;
  uint64_t from;
};

namespace {

bool same(const PackedMap::Dim& a, const PackedMap::Dim& b) {
  return a.count == b.count && a.to == b.to && a.from == b.from;
}

/// How far apart two elements or nests are, in packed bytes and in bytes of the source.
template <typename Item>
std::pair<int64_t, int64_t> step(const Item& a, const Item& b) {
  return {static_cast<int64_t>(b.to - a.to), static_cast<int64_t>(b.from - a.from)};
}

/// Whether a group of `period` nests follows on another one, all at the same step.
bool follows(const std::vector<PackedMap::Nest>& nests, size_t begin, size_t period) {
  const auto all = step(nests[begin], nests[begin + period]);
  for (size_t i = begin; i < begin + period; ++i) {
    const PackedMap::Nest& next = nests[i + period];
    if (step(nests[i], next) != all ||
        !std::equal(nests[i].dims.begin(), nests[i].dims.end(), next.dims.begin(), next.dims.end(), same)) {
      return false;
    }
  }
  return true;
}

/// Join equal nests at equal steps, and equal groups of nests: a kernel that shuffles the words of a row repeats a
/// group. Each nest of a group gets one more dimension.
std::vector<PackedMap::Nest> joined(const std::vector<PackedMap::Nest>& nests) {
  std::vector<PackedMap::Nest> out;
  for (size_t begin = 0; begin < nests.size();) {
    const size_t most = std::min(kLongestGroup, (nests.size() - begin) / 2);
    size_t period = 1;
    while (period <= most && !follows(nests, begin, period)) {
      ++period;
    }
    if (period > most) {
      out.push_back(nests[begin++]);
      continue;
    }
    const auto by = step(nests[begin], nests[begin + period]);
    size_t last = begin + period; // where the last group begins
    while (last + 2 * period <= nests.size() && follows(nests, last, period) &&
           step(nests[last], nests[last + period]) == by) {
      last += period;
    }
    for (size_t i = begin; i < begin + period; ++i) {
      out.push_back(nests[i]);
      out.back().dims.push_back({(last - begin) / period + 1, by.first, by.second});
    }
    begin = last + period;
  }
  return out;
}

} // namespace

/// Join elements to runs, equal runs to runs of runs, and so on.
void PackedMap::add(const std::vector<Element>& elements, Kind kind, uint8_t source, uint64_t terms) {
  std::vector<Nest> nests;
  nests.reserve(elements.size());
  // the first joining, without a nest for each element
  for (size_t begin = 0; begin < elements.size();) {
    size_t end = begin + 1;
    Nest run{kind, source, elements[begin].to, elements[begin].from, terms, {}};
    if (end < elements.size()) {
      const auto by = step(elements[begin], elements[end]);
      while (end < elements.size() && step(elements[end - 1], elements[end]) == by) {
        ++end;
      }
      run.dims.push_back({end - begin, by.first, by.second});
    }
    nests.push_back(std::move(run));
    begin = end;
  }
  for (size_t level = 1; level < kMostDims; ++level) {
    std::vector<Nest> next = joined(nests);
    const bool done = next.size() == nests.size();
    nests = std::move(next);
    if (done) {
      break;
    }
  }
  nests_.insert(nests_.end(), nests.begin(), nests.end());
}

std::optional<PackedMap> PackedMap::learn(const std::vector<size_t>& sizes, const Pack& pack) {
  if (sizes[0] != 0 && can_be_numbered(sizes)) {
    for (const auto learn : {&learn_floats, &learn_int8}) {
      std::optional<PackedMap> map = learn(sizes, pack);
      if (map && map->nests_.size() <= kMostNests && map->is_right(sizes, pack)) {
        return map;
      }
    }
  }
  return std::nullopt;
}

bool PackedMap::gives(const PackedSources& sources, const uint8_t* packed, size_t size) const {
  std::vector<size_t> sizes;
  for (const PackedSource& source : sources) {
    sizes.push_back(source.size);
  }
  if (!fits(sizes, size)) {
    return false;
  }
  std::vector<uint8_t> made(size);
  apply(sources, made.data());
  return std::memcmp(made.data(), packed, size) == 0;
}

/// 24 bits, as those of Knuth's MMIX.
uint32_t TestNumbers::next() {
  state_ = state_ * 6'364'136'223'846'793'005 + 1'442'695'040'888'963'407;
  return static_cast<uint32_t>(state_ >> 40);
}

void TestNumbers::fill(std::vector<uint8_t>& bytes, bool negative) {
  for (size_t at = 0; at + 4 <= bytes.size(); at += 4) {
    const float number = 0.5f + 0x1.8p-24f * static_cast<float>(next()); // below 2, so that it is a scale, too
    store(bytes.data() + at, negative && next() % 2 == 0 ? -number : number);
  }
}

/// Try the map on other contents.
bool PackedMap::is_right(const std::vector<size_t>& sizes, const Pack& pack) const {
  TestNumbers numbers;
  std::vector<std::vector<uint8_t>> contents(sizes.begin(), sizes.end());
  PackedSources sources;
  for (std::vector<uint8_t>& bytes : contents) {
    numbers.fill(bytes, sources.empty());
    sources.push_back({bytes.data(), bytes.size()});
  }
  const auto packed = pack(contents);
  return packed && gives(sources, packed->data(), packed->size());
}

namespace {

/// Add one digit of the index of the weight that each packed word is.
/// @returns whether all words are numbers that were given.
bool count_words(
    const std::vector<uint8_t>& packed, uint64_t divisor, std::vector<uint64_t>& index, std::vector<uint64_t>& other) {
  for (size_t i = 0; i < index.size(); ++i) {
    const std::optional<int64_t> number = number_of(packed.data() + 4 * i);
    if (!number) {
      return false;
    }
    if (*number < 0) {
      other[i] = static_cast<uint64_t>(-*number);
    } else if (*number > 0) {
      index[i] += (static_cast<uint64_t>(*number) - (divisor == 1 ? 0 : 1)) * divisor;
    }
  }
  return true;
}

} // namespace

/// Weights of float32, which are moved only.
std::optional<PackedMap> PackedMap::learn_floats(const std::vector<size_t>& sizes, const Pack& pack) {
  if (sizes[0] % 4 != 0) {
    return std::nullopt;
  }
  std::vector<std::vector<uint8_t>> numbers(sizes.begin(), sizes.end());
  number_others(numbers, -1.0f);
  const uint64_t weights = sizes[0] / 4;
  std::vector<uint64_t> index; // of the weight that each packed word is, plus 1
  std::vector<uint64_t> other; // ... or of the number beside the weight
  for (uint64_t divisor = 1; divisor <= std::max<uint64_t>(weights - 1, 1); divisor *= kMostWord) {
    number_weight(numbers[0], divisor);
    const auto packed = pack(numbers);
    if (!packed || packed->size() % 4 != 0 || (divisor != 1 && packed->size() / 4 != index.size())) {
      return std::nullopt;
    }
    index.resize(packed->size() / 4);
    other.assign(index.size(), 0);
    if (!count_words(*packed, divisor, index, other)) {
      return std::nullopt;
    }
  }
  PackedMap map;
  map.size_ = index.size() * 4;
  std::vector<std::vector<Element>> from(sizes.size());
  for (uint64_t i = 0; i < index.size(); ++i) {
    if (index[i] != 0) {
      from[0].push_back({4 * i, 4 * (index[i] - 1)});
    } else if (other[i] != 0 && other[i] <= (sizes.size() - 1) * kPerSource) {
      from[1 + (other[i] - 1) / kPerSource].push_back({4 * i, 4 * ((other[i] - 1) % kPerSource)});
    }
  }
  for (size_t source = 0; source < from.size(); ++source) {
    map.add(from[source], Kind::Word, static_cast<uint8_t>(source), 0);
  }
  return map;
}

/// What packings of numbers show of weights of int8: where each lies, and the sums of rows.
struct PackedMap::Int8 {
  static constexpr uint64_t kBase = 100; // int8 counts up to 127

  uint64_t terms; // of a sum
  std::vector<std::vector<Element>> from; // of each source
  std::vector<bool> taken; // packed bytes that are no weights
  std::vector<uint64_t> index; // of the weight that each packed byte is, plus 1
  std::vector<std::vector<int64_t>> sums; // of each row, in each packing
  std::vector<std::vector<int64_t>> words; // the packed ones, in each packing

  /// @param packed numbers beside weights of zero.
  Int8(size_t sources, uint64_t rows, uint64_t terms, const std::vector<uint8_t>& packed)
      : terms(terms), from(sources), taken(packed.size()), index(packed.size()), sums(rows), words(packed.size() / 4) {
    for (uint64_t at = 0; at + 4 <= packed.size(); at += 4) {
      const std::optional<int64_t> number = number_of(packed.data() + at);
      if (number && *number > 0 && static_cast<uint64_t>(*number) <= (sources - 1) * kPerSource) {
        const uint64_t of = static_cast<uint64_t>(*number) - 1;
        from[1 + of / kPerSource].push_back({at, 4 * (of % kPerSource)});
        take(at);
      }
    }
  }

  void take(uint64_t at) { std::fill_n(taken.begin() + static_cast<std::ptrdiff_t>(at), 4, true); }

  /// @param weights numbered by one digit of their index. @param packed what was made of them.
  void count(const std::vector<uint8_t>& weights, const std::vector<uint8_t>& packed, uint64_t divisor) {
    for (uint64_t row = 0; row < sums.size(); ++row) {
      const auto begin = weights.begin() + static_cast<std::ptrdiff_t>(row * terms);
      sums[row].push_back(std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(terms), int64_t{0}));
    }
    for (uint64_t word = 0; word < words.size(); ++word) {
      words[word].push_back(load<int32_t>(packed.data() + 4 * word));
    }
    for (uint64_t at = 0; at < packed.size(); ++at) {
      const uint8_t value = packed[at];
      if (!taken[at] && value >= 1 && value <= kBase) {
        index[at] += (value - (divisor == 1 ? 0 : 1)) * divisor;
      }
    }
  }

  /// Words that were the sum of a row in every packing, each time with this sign.
  std::vector<Element> find_sums(int64_t sign) {
    std::map<std::vector<int64_t>, uint64_t> row_of;
    for (uint64_t row = 0; row < sums.size(); ++row) {
      std::vector<int64_t> signed_sums = sums[row];
      for (int64_t& sum : signed_sums) {
        sum *= sign;
      }
      row_of.emplace(std::move(signed_sums), row);
    }
    std::vector<Element> found;
    for (uint64_t word = 0; word < words.size(); ++word) {
      const auto row = taken[4 * word] ? row_of.end() : row_of.find(words[word]);
      if (row != row_of.end()) {
        found.push_back({4 * word, row->second * terms});
        take(4 * word);
      }
    }
    return found;
  }

  /// Bytes that are a weight. Call this when all others are taken.
  void find_weights() {
    for (uint64_t at = 0; at < index.size(); ++at) {
      if (!taken[at] && index[at] != 0) {
        from[0].push_back({at, index[at] - 1});
      }
    }
  }
};

/// Weights of int8 whose inputs are quantized when the program runs: they are moved, and sums of rows are beside them.
std::optional<PackedMap> PackedMap::learn_int8(const std::vector<size_t>& sizes, const Pack& pack) {
  const uint64_t rows = *std::max_element(sizes.begin() + 1, sizes.end()) / 4; // each has a scale
  if (rows == 0 || sizes[0] % rows != 0) {
    return std::nullopt;
  }
  std::vector<std::vector<uint8_t>> numbers(sizes.begin(), sizes.end());
  number_others(numbers, 1.0f);
  const auto around = pack(numbers);
  if (!around) {
    return std::nullopt;
  }
  Int8 shown(sizes.size(), rows, sizes[0] / rows, *around);
  for (uint64_t divisor = 1; divisor <= std::max<uint64_t>(sizes[0] - 1, 1); divisor *= Int8::kBase) {
    for (uint64_t i = 0; i < sizes[0]; ++i) {
      numbers[0][i] = static_cast<uint8_t>(i / divisor % Int8::kBase + 1);
    }
    const auto packed = pack(numbers);
    if (!packed || packed->size() != around->size()) {
      return std::nullopt;
    }
    shown.count(numbers[0], *packed, divisor);
  }
  const std::vector<Element> negative = shown.find_sums(-1);
  const std::vector<Element> positive = shown.find_sums(1);
  shown.find_weights();
  PackedMap map;
  map.size_ = around->size();
  map.add(shown.from[0], Kind::Byte, 0, 0);
  map.add(negative, Kind::MinusSum, 0, shown.terms);
  map.add(positive, Kind::Sum, 0, shown.terms);
  for (size_t source = 1; source < shown.from.size(); ++source) {
    map.add(shown.from[source], Kind::Word, static_cast<uint8_t>(source), 0);
  }
  return map;
}

namespace {

/// One element of a nest.
template <PackedMap::Kind kind>
void put(uint8_t* to, const uint8_t* from, uint64_t terms) {
  if constexpr (kind == PackedMap::Kind::Word) {
    std::memcpy(to, from, 4);
  } else if constexpr (kind == PackedMap::Kind::Byte) {
    *to = *from;
  } else {
    int32_t sum = 0;
    for (uint64_t i = 0; i < terms; ++i) {
      sum += static_cast<int8_t>(from[i]);
    }
    store(to, kind == PackedMap::Kind::Sum ? sum : -sum);
  }
}

using Four = uint32_t __attribute__((vector_size(16)));

inline Four load_four(const uint8_t* from) {
  Four value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store_four(uint8_t* to, Four value) {
  std::memcpy(to, &value, sizeof value);
}

#if defined(__clang__)
#define BLOBSTORE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define BLOBSTORE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Four{__VA_ARGS__})
#endif

/// Exchange rows and columns of four by four words.
inline void transpose_four(uint8_t* to, int64_t to_step, const uint8_t* from, int64_t from_step) {
  const Four a = load_four(from);
  const Four b = load_four(from + from_step);
  const Four c = load_four(from + 2 * from_step);
  const Four d = load_four(from + 3 * from_step);
  const Four ab_low = BLOBSTORE_SHUFFLE(a, b, 0, 4, 1, 5);
  const Four ab_high = BLOBSTORE_SHUFFLE(a, b, 2, 6, 3, 7);
  const Four cd_low = BLOBSTORE_SHUFFLE(c, d, 0, 4, 1, 5);
  const Four cd_high = BLOBSTORE_SHUFFLE(c, d, 2, 6, 3, 7);
  store_four(to, BLOBSTORE_SHUFFLE(ab_low, cd_low, 0, 1, 4, 5));
  store_four(to + to_step, BLOBSTORE_SHUFFLE(ab_low, cd_low, 2, 3, 6, 7));
  store_four(to + 2 * to_step, BLOBSTORE_SHUFFLE(ab_high, cd_high, 0, 1, 4, 5));
  store_four(to + 3 * to_step, BLOBSTORE_SHUFFLE(ab_high, cd_high, 2, 3, 6, 7));
}

#undef BLOBSTORE_SHUFFLE

/// Four rows of a tile.
inline void transpose_row(uint8_t* to, int64_t to_step, const uint8_t* from, int64_t from_step, uint64_t columns) {
  for (int64_t i = 0; i < 4; ++i) {
    __builtin_prefetch(from + i * from_step + kAhead, 0, 2);
  }
  for (uint64_t column = 0; column < columns; column += 4) {
    const auto at = static_cast<int64_t>(column);
    transpose_four(to + at * to_step, to_step, from + 4 * at, from_step);
  }
}

/// Words of which one side goes on where the other one begins a row, four by four.
/// @param streamed whether to stream those that can be: each tile is made in the nearest cache.
void transpose(
    uint8_t* to,
    const uint8_t* from,
    uint64_t rows,
    int64_t from_step,
    uint64_t columns,
    int64_t to_step,
    bool streamed) {
  const auto at = [](uint64_t index, int64_t step) { return static_cast<int64_t>(index) * step; };
  const uint64_t whole_rows = rows / 4 * 4;
  const uint64_t whole_columns = columns / 4 * 4;
  alignas(kStreamed) std::array<uint8_t, 4 * kMostRows * kTile> tile;
  streamed = kStreams && streamed && rows == whole_rows && rows <= kMostRows && to_step % kStreamed == 0 &&
      reinterpret_cast<uintptr_t>(to) % kStreamed == 0;
  const int64_t step = streamed ? static_cast<int64_t>(4 * rows) : to_step;
  for (uint64_t begin = 0; begin < whole_columns; begin += kTile) {
    const uint64_t end = std::min(whole_columns, begin + kTile);
    uint8_t* const out = streamed ? tile.data() : to + at(begin, to_step);
    for (uint64_t row = 0; row < whole_rows; row += 4) {
      transpose_row(out + at(row, 4), step, from + at(row, from_step) + at(begin, 4), from_step, end - begin);
    }
    for (uint64_t column = begin; streamed && column < end; ++column) {
      stream(to + at(column, to_step), out + at(column - begin, step), 4 * rows);
    }
  }
  for (uint64_t row = 0; row < rows; ++row) {
    for (uint64_t column = row < whole_rows ? whole_columns : 0; column < columns; ++column) {
      std::memcpy(to + at(row, 4) + at(column, to_step), from + at(row, from_step) + at(column, 4), 4);
    }
  }
}

template <PackedMap::Kind kind>
void run(const PackedMap::Nest& nest, size_t level, uint8_t* to, const uint8_t* from, bool streamed) {
  if (level == 0) {
    put<kind>(to, from, nest.terms);
    return;
  }
  const PackedMap::Dim& dim = nest.dims[level - 1];
  if (level == 2) { // in tiles, so that the lines of both sides stay in the cache of the processor
    const PackedMap::Dim& inner = nest.dims[0];
    if (kind == PackedMap::Kind::Word && inner.to == 4 && dim.from == 4) {
      transpose(to, from, inner.count, inner.from, dim.count, dim.to, streamed);
      return;
    }
    for (uint64_t begin = 0; begin < dim.count; begin += kTile) {
      const uint64_t end = std::min(dim.count, begin + kTile);
      for (uint64_t i = 0; i < inner.count; ++i) {
        uint8_t* at = to + static_cast<int64_t>(i) * inner.to + static_cast<int64_t>(begin) * dim.to;
        const uint8_t* source = from + static_cast<int64_t>(i) * inner.from + static_cast<int64_t>(begin) * dim.from;
        for (uint64_t j = begin; j < end; ++j, at += dim.to, source += dim.from) {
          put<kind>(at, source, nest.terms);
        }
      }
    }
    return;
  }
  for (uint64_t i = 0; i < dim.count; ++i) {
    const auto step = static_cast<int64_t>(i);
    run<kind>(nest, level - 1, to + step * dim.to, from + step * dim.from, streamed);
  }
}

} // namespace

void PackedMap::apply(const PackedSources& sources, uint8_t* packed) const {
  write(sources, std::vector<bool>(sources.size(), true), packed, /*streamed=*/false);
}

void PackedMap::update(const PackedSources& sources, const std::vector<bool>& changed, uint8_t* packed) const {
  write(sources, changed, packed, size_ >= kWorthStreaming);
  end_streaming();
}

void PackedMap::write(
    const PackedSources& sources, const std::vector<bool>& changed, uint8_t* packed, bool streamed) const {
  constexpr decltype(&run<Kind::Word>) kRuns[] = {
      // by the number of the kind
      &run<Kind::Word>,
      &run<Kind::Byte>,
      &run<Kind::MinusSum>,
      &run<Kind::Sum>};
  for (const Nest& nest : nests_) {
    if (!changed[nest.source]) {
      continue;
    }
    uint8_t* to = packed + nest.to;
    const uint8_t* from = sources[nest.source].data + nest.from;
    kRuns[static_cast<size_t>(nest.kind)](nest, nest.dims.size(), to, from, streamed);
  }
}

namespace {

/// How many elements a nest has; 0 if any of them is not within its source, or not within the packed bytes.
uint64_t elements_within(const PackedMap::Nest& nest, size_t source, uint64_t packed) {
  using Kind = PackedMap::Kind;
  const uint64_t width = nest.kind == Kind::Byte ? 1 : 4;
  const bool summed = nest.kind == Kind::MinusSum || nest.kind == Kind::Sum;
  // the lowest and the highest byte of either side, in numbers that cannot overflow
  __int128 to_low = nest.to;
  __int128 to_high = static_cast<__int128>(nest.to) + width;
  __int128 from_low = nest.from;
  __int128 from_high = static_cast<__int128>(nest.from) + (summed ? nest.terms : width);
  uint64_t count = 1;
  for (const PackedMap::Dim& dim : nest.dims) {
    if (dim.count == 0 || dim.count > packed || count > packed / dim.count) {
      return 0;
    }
    count *= dim.count;
    const __int128 to = static_cast<__int128>(dim.count - 1) * dim.to;
    const __int128 from = static_cast<__int128>(dim.count - 1) * dim.from;
    (to < 0 ? to_low : to_high) += to;
    (from < 0 ? from_low : from_high) += from;
  }
  const bool within = to_low >= 0 && to_high <= static_cast<__int128>(packed) && from_low >= 0 &&
      from_high <= static_cast<__int128>(source);
  return within ? count : 0;
}

} // namespace

bool PackedMap::has_scales() const {
  return std::any_of(nests_.begin(), nests_.end(), [](const Nest& nest) { return nest.kind != Kind::Word; });
}

std::string PackedMap::encode() const {
  Encoder encoder;
  encoder.value<uint64_t>(size_);
  encoder.value<uint64_t>(nests_.size());
  for (const Nest& nest : nests_) {
    encoder.value(static_cast<uint64_t>(nest.kind));
    encoder.value<uint64_t>(nest.source);
    encoder.value(nest.to);
    encoder.value(nest.from);
    encoder.value(nest.terms);
    encoder.value<uint64_t>(nest.dims.size());
    for (const Dim& dim : nest.dims) {
      encoder.value(dim);
    }
  }
  return std::move(encoder.bytes);
}

std::optional<PackedMap> PackedMap::decode(const uint8_t* data, size_t size) {
  Decoder decoder(data, 0, size);
  PackedMap map;
  map.size_ = decoder.value<uint64_t>();
  const auto nests = decoder.value<uint64_t>();
  if (nests > kMostNests) {
    return std::nullopt;
  }
  for (uint64_t i = 0; decoder.whole() && i < nests; ++i) {
    Nest nest;
    const auto kind = decoder.value<uint64_t>();
    const auto source = decoder.value<uint64_t>();
    nest.kind = static_cast<Kind>(kind);
    nest.source = static_cast<uint8_t>(source);
    nest.to = decoder.value<uint64_t>();
    nest.from = decoder.value<uint64_t>();
    nest.terms = decoder.value<uint64_t>();
    const auto dims = decoder.value<uint64_t>();
    if (kind > static_cast<uint64_t>(Kind::Sum) || source >= kMostSources || dims > kMostDims) {
      return std::nullopt;
    }
    for (uint64_t j = 0; j < dims; ++j) {
      nest.dims.push_back(decoder.value<Dim>());
    }
    map.nests_.push_back(std::move(nest));
  }
  return decoder.whole() && decoder.at_end() ? std::optional(std::move(map)) : std::nullopt;
}

bool PackedMap::fits(const std::vector<size_t>& sizes, size_t packed) const {
  if (packed != size_ || size_ > static_cast<size_t>(PTRDIFF_MAX)) {
    return false;
  }
  uint64_t elements = 0;
  for (const Nest& nest : nests_) {
    const uint64_t count = nest.source < sizes.size() ? elements_within(nest, sizes[nest.source], size_) : 0;
    elements += count;
    if (count == 0 || elements > size_) {
      return false;
    }
  }
  return true;
}

} // namespace blobstore::internal
