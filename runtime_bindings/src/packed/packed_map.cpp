#include "packed/packed_map.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

namespace blobstore::internal {
namespace {

constexpr size_t kMostDims = 6;
constexpr size_t kMostNests = 4096; // a longer map would not be compact
constexpr uint64_t kTile = 16;

template <typename Number>
Number load(const uint8_t* from) {
  Number value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename Number>
void store(uint8_t* to, Number value) {
  std::memcpy(to, &value, sizeof value);
}

/// The words of an array, each with its own number: the digit of its index to a base, plus 1.
void number_words(std::vector<uint8_t>& bytes, uint64_t divisor, uint64_t base, float sign) {
  for (size_t i = 0; i < bytes.size() / 4; ++i) {
    store(bytes.data() + 4 * i, sign * static_cast<float>(i / divisor % base + 1));
  }
}

} // namespace

/// An element of the packed bytes, and where it comes from.
struct PackedMap::Element {
  uint64_t to;
  uint64_t from;
};

/// Join elements to runs, equal runs to runs of runs, and so on.
void PackedMap::add(const std::vector<Element>& elements, Kind kind, uint8_t source, uint64_t terms) {
  std::vector<Nest> now;
  const auto joined = [](const std::vector<Nest>& items) {
    std::vector<Nest> out;
    for (size_t i = 0; i < items.size();) {
      size_t end = i + 1;
      const auto same = [&](size_t at) {
        return items[at].dims.size() == items[i].dims.size() &&
            std::equal(
                   items[at].dims.begin(), items[at].dims.end(), items[i].dims.begin(), [](const Dim& a, const Dim& b) {
                     return a.count == b.count && a.to == b.to && a.from == b.from;
                   });
      };
      const auto step = [&](size_t at) {
        return std::pair(
            static_cast<int64_t>(items[at].to - items[at - 1].to),
            static_cast<int64_t>(items[at].from - items[at - 1].from));
      };
      if (end < items.size() && same(end)) {
        const auto first = step(end);
        while (end < items.size() && same(end) && step(end) == first) {
          ++end;
        }
        out.push_back(items[i]);
        out.back().dims.push_back({end - i, first.first, first.second});
      } else {
        out.push_back(items[i]);
      }
      i = end;
    }
    return out;
  };
  now.reserve(elements.size());
  // the first joining, without a nest for each element
  for (size_t i = 0; i < elements.size();) {
    size_t end = i + 1;
    Nest run{kind, source, elements[i].to, elements[i].from, terms, {}};
    if (end < elements.size()) {
      const auto to = static_cast<int64_t>(elements[end].to - elements[i].to);
      const auto from = static_cast<int64_t>(elements[end].from - elements[i].from);
      while (end < elements.size() && static_cast<int64_t>(elements[end].to - elements[end - 1].to) == to &&
             static_cast<int64_t>(elements[end].from - elements[end - 1].from) == from) {
        ++end;
      }
      run.dims.push_back({end - i, to, from});
    }
    now.push_back(std::move(run));
    i = end;
  }
  for (size_t level = 1; level < kMostDims; ++level) {
    std::vector<Nest> next = joined(now);
    const bool done = next.size() == now.size();
    now = std::move(next);
    if (done) {
      break;
    }
  }
  nests_.insert(nests_.end(), now.begin(), now.end());
}

std::optional<PackedMap> PackedMap::learn(const std::vector<size_t>& sizes, const Pack& pack) {
  if (sizes[0] == 0) {
    return std::nullopt;
  }
  std::vector<std::vector<uint8_t>> numbers;
  for (const size_t size : sizes) {
    numbers.emplace_back(size);
  }
  const auto of_words = [&]() -> std::optional<PackedMap> {
    if (sizes[0] % 4 != 0 || sizes[1] % 4 != 0 || sizes.size() > 2) {
      return std::nullopt;
    }
    constexpr uint64_t kBase = (1 << 24) - 2; // floats count exactly up to 2**24
    const uint64_t weights = sizes[0] / 4;
    std::vector<uint64_t> index; // of the weight that each packed word is, plus 1
    std::vector<uint64_t> of_bias;
    for (uint64_t divisor = 1; divisor == 1 || divisor <= weights - 1; divisor *= kBase) {
      number_words(numbers[0], divisor, kBase, 1.0f);
      number_words(numbers[1], 1, kBase, -1.0f);
      const auto packed = pack(numbers);
      if (!packed || packed->size() % 4 != 0 || (divisor != 1 && packed->size() / 4 != index.size())) {
        return std::nullopt;
      }
      index.resize(packed->size() / 4);
      of_bias.resize(index.size());
      for (size_t i = 0; i < index.size(); ++i) {
        const auto value = load<float>(packed->data() + 4 * i);
        if (!(value >= -static_cast<float>(kBase) && value <= static_cast<float>(kBase)) ||
            value != static_cast<float>(static_cast<int64_t>(value))) {
          return std::nullopt;
        }
        if (value < 0) {
          of_bias[i] = static_cast<uint64_t>(-value);
        } else if (value > 0) {
          index[i] += (static_cast<uint64_t>(value) - (divisor == 1 ? 0 : 1)) * divisor;
        }
      }
    }
    PackedMap map;
    map.size_ = index.size() * 4;
    std::vector<Element> from_weight;
    std::vector<Element> from_bias;
    for (uint64_t i = 0; i < index.size(); ++i) {
      if (index[i] > weights || of_bias[i] > sizes[1] / 4) {
        return std::nullopt;
      }
      if (index[i] != 0) {
        from_weight.push_back({4 * i, 4 * (index[i] - 1)});
      } else if (of_bias[i] != 0) {
        from_bias.push_back({4 * i, 4 * (of_bias[i] - 1)});
      }
    }
    map.add(from_weight, Kind::Word, 0, 0);
    map.add(from_bias, Kind::Word, 1, 0);
    return map;
  };
  const auto of_int8 = [&]() -> std::optional<PackedMap> {
    if (sizes.size() != 3 || sizes[2] == 0 || sizes[2] % 4 != 0 || sizes[1] % 4 != 0 ||
        sizes[0] % (sizes[2] / 4) != 0) {
      return std::nullopt;
    }
    constexpr uint64_t kBase = 100; // int8 counts up to 127
    const uint64_t rows = sizes[2] / 4;
    const uint64_t terms = sizes[0] / rows;
    number_words(numbers[1], 1, uint64_t{1} << 23, -1.0f);
    number_words(numbers[2], 1, uint64_t{1} << 23, 1.0f);
    std::fill(numbers[0].begin(), numbers[0].end(), 0);
    const auto around = pack(numbers);
    if (!around) {
      return std::nullopt;
    }
    PackedMap map;
    map.size_ = around->size();
    std::vector<Element> from_bias;
    std::vector<Element> from_scale;
    std::vector<bool> known(around->size());
    for (uint64_t at = 0; at + 4 <= around->size(); at += 4) {
      const auto value = load<float>(around->data() + at);
      const float size = value < 0 ? -value : value;
      if (!(size >= 1 && size <= static_cast<float>(value < 0 ? sizes[1] / 4 : rows))) {
        continue;
      }
      if (size != static_cast<float>(static_cast<uint64_t>(size))) {
        return std::nullopt;
      }
      (value < 0 ? from_bias : from_scale).push_back({at, 4 * (static_cast<uint64_t>(size) - 1)});
      std::fill_n(known.begin() + static_cast<std::ptrdiff_t>(at), 4, true);
    }
    std::vector<uint64_t> index(around->size()); // of the weight that each packed byte is, plus 1
    std::vector<std::vector<int64_t>> sums(rows);
    std::vector<std::vector<int64_t>> words(around->size() / 4);
    uint64_t places = 1;
    for (uint64_t divisor = 1; divisor <= sizes[0] - 1 || divisor == 1; divisor *= kBase, ++places) {
      for (uint64_t i = 0; i < sizes[0]; ++i) {
        numbers[0][i] = static_cast<uint8_t>(i / divisor % kBase + 1);
      }
      const auto packed = pack(numbers);
      if (!packed || packed->size() != around->size()) {
        return std::nullopt;
      }
      for (uint64_t row = 0; row < rows; ++row) {
        int64_t sum = 0;
        for (uint64_t i = 0; i < terms; ++i) {
          sum += numbers[0][row * terms + i];
        }
        sums[row].push_back(-sum);
      }
      for (uint64_t at = 0; at < packed->size(); ++at) {
        const uint8_t value = (*packed)[at];
        if (at % 4 == 0 && at + 4 <= packed->size()) {
          words[at / 4].push_back(load<int32_t>(packed->data() + at));
        }
        if (!known[at] && value >= 1 && value <= kBase) {
          index[at] += (value - (divisor == 1 ? 0 : 1)) * divisor;
        }
      }
    }
    std::map<std::vector<int64_t>, uint64_t> row_of;
    for (uint64_t row = 0; row < rows; ++row) {
      row_of.emplace(sums[row], row);
    }
    std::vector<Element> from_rows;
    std::vector<Element> from_weight;
    for (uint64_t at = 0; at < index.size(); ++at) {
      if (at % 4 == 0 && at / 4 < words.size() && !known[at]) {
        if (const auto row = row_of.find(words[at / 4]); row != row_of.end()) {
          from_rows.push_back({at, row->second * terms});
          std::fill_n(known.begin() + static_cast<std::ptrdiff_t>(at), 4, true);
        }
      }
      if (!known[at] && index[at] != 0 && index[at] <= sizes[0]) {
        from_weight.push_back({at, index[at] - 1});
      }
    }
    map.add(from_weight, Kind::Byte, 0, 0);
    map.add(from_rows, Kind::MinusSum, 0, terms);
    map.add(from_bias, Kind::Word, 1, 0);
    map.add(from_scale, Kind::Word, 2, 0);
    return map;
  };
  std::optional<PackedMap> map = sizes.size() == 2 ? of_words() : of_int8();
  return map && map->nests_.size() <= kMostNests ? map : std::nullopt;
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
    store(to, -sum);
  }
}

template <PackedMap::Kind kind>
void run(const PackedMap::Nest& nest, size_t level, uint8_t* to, const uint8_t* from) {
  if (level == 0) {
    put<kind>(to, from, nest.terms);
    return;
  }
  const PackedMap::Dim& dim = nest.dims[level - 1];
  if (level == 2) { // in tiles, so that the lines of both sides stay in the cache of the processor
    const PackedMap::Dim& inner = nest.dims[0];
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
    run<kind>(nest, level - 1, to + static_cast<int64_t>(i) * dim.to, from + static_cast<int64_t>(i) * dim.from);
  }
}

} // namespace

void PackedMap::apply(const PackedSources& sources, uint8_t* packed) const {
  for (const Nest& nest : nests_) {
    uint8_t* to = packed + nest.to;
    const uint8_t* from = sources[nest.source].data + nest.from;
    switch (nest.kind) {
      case Kind::Word:
        run<Kind::Word>(nest, nest.dims.size(), to, from);
        break;
      case Kind::Byte:
        run<Kind::Byte>(nest, nest.dims.size(), to, from);
        break;
      case Kind::MinusSum:
        run<Kind::MinusSum>(nest, nest.dims.size(), to, from);
        break;
    }
  }
}

std::string PackedMap::encode() const {
  std::string text;
  const auto put_number = [&](uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) {
      text += static_cast<char>(value >> shift);
    }
  };
  put_number(size_);
  put_number(nests_.size());
  for (const Nest& nest : nests_) {
    put_number(static_cast<uint64_t>(nest.kind));
    put_number(nest.source);
    put_number(nest.to);
    put_number(nest.from);
    put_number(nest.terms);
    put_number(nest.dims.size());
    for (const Dim& dim : nest.dims) {
      put_number(dim.count);
      put_number(static_cast<uint64_t>(dim.to));
      put_number(static_cast<uint64_t>(dim.from));
    }
  }
  return text;
}

std::optional<PackedMap> PackedMap::decode(const uint8_t* data, size_t size) {
  size_t at = 0;
  bool whole = true;
  const auto number = [&]() -> uint64_t {
    if (size - at < 8) {
      whole = false;
      return 0;
    }
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) {
      value |= uint64_t{data[at + static_cast<size_t>(i)]} << 8 * i;
    }
    at += 8;
    return value;
  };
  PackedMap map;
  map.size_ = number();
  const uint64_t nests = number();
  if (nests > kMostNests) {
    return std::nullopt;
  }
  for (uint64_t i = 0; whole && i < nests; ++i) {
    Nest nest;
    const uint64_t kind = number();
    const uint64_t source = number();
    nest.kind = static_cast<Kind>(kind);
    nest.source = static_cast<uint8_t>(source);
    nest.to = number();
    nest.from = number();
    nest.terms = number();
    const uint64_t dims = number();
    if (kind > static_cast<uint64_t>(Kind::MinusSum) || source > 2 || dims > kMostDims) {
      return std::nullopt;
    }
    for (uint64_t j = 0; j < dims; ++j) {
      Dim dim;
      dim.count = number();
      dim.to = static_cast<int64_t>(number());
      dim.from = static_cast<int64_t>(number());
      nest.dims.push_back(dim);
    }
    map.nests_.push_back(std::move(nest));
  }
  return whole && at == size ? std::optional(std::move(map)) : std::nullopt;
}

bool PackedMap::fits(const std::vector<size_t>& sizes, size_t packed) const {
  if (packed != size_ || size_ > static_cast<size_t>(PTRDIFF_MAX)) {
    return false;
  }
  uint64_t elements = 0;
  for (const Nest& nest : nests_) {
    if (nest.source >= sizes.size()) {
      return false;
    }
    const uint64_t width = nest.kind == Kind::Byte ? 1 : 4;
    const uint64_t taken = nest.kind == Kind::MinusSum ? nest.terms : width;
    // the lowest and the highest byte of either side, in numbers that cannot overflow
    __int128 to_low = nest.to;
    __int128 to_high = static_cast<__int128>(nest.to) + width;
    __int128 from_low = nest.from;
    __int128 from_high = static_cast<__int128>(nest.from) + taken;
    uint64_t count = 1;
    for (const Dim& dim : nest.dims) {
      if (dim.count == 0 || dim.count > size_ || count > size_ / dim.count) {
        return false;
      }
      count *= dim.count;
      const __int128 to = static_cast<__int128>(dim.count - 1) * dim.to;
      const __int128 from = static_cast<__int128>(dim.count - 1) * dim.from;
      (to < 0 ? to_low : to_high) += to;
      (from < 0 ? from_low : from_high) += from;
    }
    elements += count;
    if (elements > size_ || to_low < 0 || to_high > static_cast<__int128>(size_) || from_low < 0 ||
        from_high > static_cast<__int128>(sizes[nest.source])) {
      return false;
    }
  }
  return true;
}

} // namespace blobstore::internal
