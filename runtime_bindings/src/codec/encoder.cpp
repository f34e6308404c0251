#include "codec/encoder.h"

#include <algorithm>
#include <cstring>

#include "codec/numbers.h"

namespace blobstore::internal {
namespace {

constexpr double kWorth = 0.95; // a stream that zstd does not make smaller than this is stored as it is
constexpr size_t kProbe = size_t{1} << 14;

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

Bytes ChunkEncoder::encode(const Encoding& encoding, Bytes chunk, const uint8_t* base) {
  if (!out_) {
    plane_ = room_of(kChunk);
    numbers_ = room_of(kChunk);
    out_ = room_of(kMostStored + Compressor::bound(kChunk));
  }
  end_ = sizeof(uint32_t);
  const size_t count = chunk.size / encoding.width;
  with_element(encoding.width, [&](auto element) {
    using T = decltype(element);
    if (encoding.kind == Encoding::Kind::Planes) {
      split<T>(chunk.data, count);
    } else if (encoding.floating) {
      near<T, true>(encoding, chunk.data, base, count);
    } else {
      near<T, false>(encoding, chunk.data, base, count);
    }
  });
  const size_t whole = count * encoding.width;
  stream(chunk.data + whole, chunk.size - whole);
  store(out_.get(), static_cast<uint32_t>(end_ - sizeof(uint32_t)));
  return {out_.get(), end_};
}

/// Write a stream: a zstd frame if it pays. Of long streams, a piece is tried first.
void ChunkEncoder::stream(const uint8_t* data, size_t size) {
  uint8_t* head = out_.get() + end_;
  uint8_t* stored = head + 1 + sizeof(uint32_t);
  size_t length = 0;
  const auto pays = [&](const uint8_t* from, size_t of) {
    length = of == 0 ? 0 : compressor_.compress(from, of, stored);
    return length != 0 && static_cast<double>(length) < kWorth * static_cast<double>(of);
  };
  const bool framed = (size <= 4 * kProbe || pays(data + size / 2, kProbe)) && pays(data, size);
  if (!framed) {
    length = size;
    if (size != 0) {
      std::memcpy(stored, data, size);
    }
  }
  head[0] = framed ? 1 : 0;
  store(head + 1, static_cast<uint32_t>(length));
  end_ += 1 + sizeof(uint32_t) + length;
}

/// Write the planes of elements.
template <typename T>
void ChunkEncoder::split(const uint8_t* elements, size_t count) {
  if constexpr (sizeof(T) == 1) {
    stream(elements, count);
  } else {
    for (size_t plane = 0; plane < sizeof(T); ++plane) {
      for (size_t i = 0; i < count; ++i) {
        plane_[i] = static_cast<uint8_t>(load<T>(elements + i * sizeof(T)) >> (8 * plane));
      }
      stream(plane_.get(), count);
    }
  }
}

template <typename T, bool kFloating>
void ChunkEncoder::near(const Encoding& encoding, const uint8_t* elements, const uint8_t* base, size_t count) {
  uint8_t* numbers = numbers_.get();
  for (size_t i = 0; i < count; ++i) {
    const size_t at = i * sizeof(T);
    store(numbers + at, difference<kFloating>(load<T>(elements + at), load<T>(base + at)));
  }
  if (encoding.bits == 2) {
    count = pack<T, 2>(numbers, count);
  } else if (encoding.bits == 4) {
    count = pack<T, 4>(numbers, count);
  }
  split<T>(numbers, count);
}

/// Write codes for numbers, and leave the numbers that codes do not say; how many.
template <typename T, unsigned kBits>
size_t ChunkEncoder::pack(uint8_t* numbers, size_t count) {
  constexpr T kMost = (1U << kBits) - 1;
  constexpr size_t kWord = sizeof(uint64_t); // codes of a byte each, looked at together
  constexpr size_t kBlock = 2048;
  uint8_t codes[kBlock];
  size_t packed = 0;
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
      store(plane_.get() + packed, narrowed<kBits>(word));
      packed += kBits; // of eight codes
      for (uint64_t escapes = whole_codes<kBits>(word); escapes != 0; escapes &= escapes - 1) {
        const T number = load<T>(from + (i + lowest_bit(escapes) / 8) * sizeof(T));
        store(numbers + left * sizeof(T), static_cast<T>(number - kMost));
        ++left;
      }
    }
  }
  stream(plane_.get(), (count * kBits + 7) / 8);
  return left;
}

} // namespace blobstore::internal
