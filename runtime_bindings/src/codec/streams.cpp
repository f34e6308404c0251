#include "codec/streams.h"

#include <algorithm>
#include <cstring>

#include "codec/numbers.h"

namespace blobstore::internal {
namespace {

std::unique_ptr<uint8_t[]> room_of(size_t size) {
  return std::unique_ptr<uint8_t[]>(new uint8_t[size]); // NOLINT: not make_unique, which would write to it
}

/// Of eight codes, a byte each, the lowest bit of those that have all their bits.
template <unsigned kBits>
uint64_t whole_codes(uint64_t codes) {
  uint64_t all = codes & (codes >> 1);
  if constexpr (kBits == 4) {
    all &= all >> 2;
  }
  return all & 0x0101010101010101U;
}

/// Eight codes of a byte each, the first the lowest, one behind the other.
template <unsigned kBits>
auto narrowed(uint64_t codes) {
  if constexpr (kBits == 4) {
    codes = (codes | (codes >> 4)) & 0x00FF00FF00FF00FFU;
    codes = (codes | (codes >> 8)) & 0x0000FFFF0000FFFFU;
    return static_cast<uint32_t>(codes | (codes >> 16));
  } else {
    codes = (codes | (codes >> 6)) & 0x000F000F000F000FU;
    codes = (codes | (codes >> 12)) & 0x000000FF000000FFU;
    return static_cast<uint16_t>(codes | (codes >> 24));
  }
}

} // namespace

const std::vector<Bytes>& ChunkSplitter::split(const Encoding& encoding, Bytes chunk, const uint8_t* base) {
  if (!room_) {
    numbers_ = room_of(kChunk);
    room_ = room_of(kChunk + kChunk / 2); // codes of half a byte, and beside them all elements
  }
  streams_.clear();
  end_ = 0;
  const size_t count = chunk.size / encoding.width;
  with_element(encoding.width, [&](auto element) {
    using T = decltype(element);
    if (encoding.kind == Encoding::Kind::Planes) {
      add_planes<T>(chunk.data, count);
    } else if (encoding.floating) {
      add_differences<T, true>(encoding, chunk.data, base, count);
    } else {
      add_differences<T, false>(encoding, chunk.data, base, count);
    }
  });
  const size_t whole = count * encoding.width;
  streams_.push_back({chunk.data + whole, chunk.size - whole});
  return streams_;
}

template <typename T>
void ChunkSplitter::add_planes(const uint8_t* elements, size_t count) {
  if constexpr (sizeof(T) == 1) {
    streams_.push_back({elements, count});
  } else {
    for (size_t plane = 0; plane < sizeof(T); ++plane) {
      uint8_t* bytes = room_.get() + end_;
      for (size_t i = 0; i < count; ++i) {
        bytes[i] = static_cast<uint8_t>(load<T>(elements + i * sizeof(T)) >> (8 * plane));
      }
      streams_.push_back({bytes, count});
      end_ += count;
    }
  }
}

template <typename T, bool kFloating>
void ChunkSplitter::add_differences(
    const Encoding& encoding, const uint8_t* elements, const uint8_t* base, size_t count) {
  uint8_t* numbers = numbers_.get();
  for (size_t i = 0; i < count; ++i) {
    const size_t at = i * sizeof(T);
    store(numbers + at, difference<kFloating>(load<T>(elements + at), load<T>(base + at)));
  }
  if (encoding.bits == 2) {
    count = add_codes<T, 2>(count);
  } else if (encoding.bits == 4) {
    count = add_codes<T, 4>(count);
  }
  add_planes<T>(numbers, count);
}

/// Add a stream of codes for numbers, and leave the numbers that codes do not say; how many.
template <typename T, unsigned kBits>
size_t ChunkSplitter::add_codes(size_t count) {
  constexpr T kMost = (1U << kBits) - 1;
  constexpr size_t kWord = sizeof(uint64_t); // codes of a byte each, looked at together
  constexpr size_t kBlock = 2048;
  uint8_t codes[kBlock];
  uint8_t* packed = room_.get() + end_;
  uint8_t* numbers = numbers_.get();
  size_t left = 0;
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t here = std::min(kBlock, count - first);
    const uint8_t* from = numbers + first * sizeof(T);
    for (size_t i = 0; i < here; ++i) {
      codes[i] = static_cast<uint8_t>(std::min(load<T>(from + i * sizeof(T)), kMost));
    }
    const size_t padded = (here + kWord - 1) / kWord * kWord;
    std::memset(codes + here, 0, padded - here);
    for (size_t i = 0; i < padded; i += kWord) {
      const uint64_t word = load<uint64_t>(codes + i);
      store(packed, narrowed<kBits>(word));
      packed += kBits; // of eight codes
      for (uint64_t escapes = whole_codes<kBits>(word); escapes != 0; escapes &= escapes - 1) {
        const T number = load<T>(from + (i + lowest_bit(escapes) / 8) * sizeof(T));
        store(numbers + left * sizeof(T), static_cast<T>(number - kMost));
        ++left;
      }
    }
  }
  const size_t size = (count * kBits + 7) / 8;
  streams_.push_back({room_.get() + end_, size});
  end_ += size;
  return left;
}

} // namespace blobstore::internal
