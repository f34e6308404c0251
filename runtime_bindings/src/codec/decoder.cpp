#include "codec/decoder.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "codec/numbers.h"
#include "format/format_error.h"

namespace blobstore::internal {
namespace {

constexpr size_t kStreamHead = 5;
constexpr size_t kChunkHead = 4;
constexpr uint8_t kFrame = 1;

/// The bits of a code that stands for a larger number: the lowest one of each, where all of them are set.
template <unsigned kBits>
uint64_t escapes_of(uint64_t packed) {
  if constexpr (kBits == 2) {
    return packed & (packed >> 1) & 0x5555555555555555U;
  } else {
    const uint64_t pairs = packed & (packed >> 1);
    return pairs & (pairs >> 2) & 0x1111111111111111U;
  }
}

unsigned count_bits(uint64_t word) {
  return static_cast<unsigned>(__builtin_popcountll(word));
}

/// Codes, several in a byte.
template <unsigned kBits>
class Codes {
 public:
  static constexpr size_t kInByte = 8 / kBits;
  static constexpr size_t kInWord = 64 / kBits;

  static size_t bytes_of(size_t count) { return (count + kInByte - 1) / kInByte; }

  Codes(const uint8_t* packed, size_t count) : packed_(packed), count_(count) {}

  /// The word in which code `first` is the lowest; beyond the last code there are zeros.
  uint64_t word(size_t first) const {
    const size_t rest = count_ - first;
    if (rest >= kInWord) {
      return load<uint64_t>(packed_ + first / kInByte);
    }
    uint64_t word = 0;
    std::memcpy(&word, packed_ + first / kInByte, bytes_of(rest));
    return word & ((uint64_t{1} << (rest * kBits)) - 1);
  }

  size_t escapes() const {
    size_t all = 0;
    for (size_t first = 0; first < count_; first += kInWord) {
      all += count_bits(escapes_of<kBits>(word(first)));
    }
    return all;
  }

 private:
  const uint8_t* packed_;
  size_t count_;
};

template <unsigned kBits>
constexpr auto unpacking_table() {
  std::array<std::array<uint8_t, 8 / kBits>, 256> table{};
  for (size_t byte = 0; byte < 256; ++byte) {
    for (size_t at = 0; at < 8 / kBits; ++at) {
      table[byte][at] = static_cast<uint8_t>((byte >> (at * kBits)) & ((1U << kBits) - 1));
    }
  }
  return table;
}
template <unsigned kBits>
constexpr auto kUnpacking = unpacking_table<kBits>();

template <typename T, bool kFloating>
void apply_all(const uint8_t* numbers, const uint8_t* base, uint8_t* out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const size_t at = i * sizeof(T);
    store(out + at, apply<kFloating>(load<T>(numbers + at), load<T>(base + at)));
  }
}

/// Apply codes as if none of them stood for a larger number.
template <typename T, bool kFloating, unsigned kBits>
void apply_codes(const uint8_t* packed, const uint8_t* base, uint8_t* out, size_t count) {
  constexpr size_t kBlock = 2048;
  uint8_t codes[kBlock];
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t here = std::min(kBlock, count - first);
    const uint8_t* from = packed + first / Codes<kBits>::kInByte;
    for (size_t i = 0; i < Codes<kBits>::bytes_of(here); ++i) {
      std::memcpy(codes + i * Codes<kBits>::kInByte, kUnpacking<kBits>[from[i]].data(), Codes<kBits>::kInByte);
    }
    const uint8_t* block_base = base + first * sizeof(T);
    uint8_t* block_out = out + first * sizeof(T);
    for (size_t i = 0; i < here; ++i) {
      store(block_out + i * sizeof(T), apply<kFloating>(T{codes[i]}, load<T>(block_base + i * sizeof(T))));
    }
  }
}

/// Put the larger numbers, which are in planes, where codes stand for them.
template <typename T, bool kFloating, unsigned kBits>
void apply_escapes(
    const Codes<kBits>& codes, const uint8_t* const* planes, const uint8_t* base, uint8_t* out, size_t count) {
  constexpr T kMost = (1U << kBits) - 1;
  size_t next = 0;
  for (size_t first = 0; first < count; first += Codes<kBits>::kInWord) {
    for (uint64_t left = escapes_of<kBits>(codes.word(first)); left != 0; left &= left - 1, ++next) {
      uint64_t number = 0;
      for (size_t plane = 0; plane < sizeof(T); ++plane) {
        number |= uint64_t{planes[plane][next]} << (8 * plane);
      }
      const size_t at = (first + lowest_bit(left) / kBits) * sizeof(T);
      store(out + at, apply<kFloating>(static_cast<T>(static_cast<T>(number) + kMost), load<T>(base + at)));
    }
  }
}

} // namespace

/// The streams of a chunk, one behind the other.
class ChunkDecoder::Streams {
 public:
  Streams(Bytes body, Decompressor& decompressor) : body_(body), decompressor_(decompressor) {}

  /// The next stream, which must have this many bytes.
  /// @param room where they are put if they are not in the body as they are.
  const uint8_t* take(size_t expected, uint8_t* room) {
    const Bytes stored = next(expected);
    if (stored.data == nullptr) {
      decompressor_.decompress(frame_.data, frame_.size, room, expected);
      return room;
    }
    return stored.data;
  }

  void take_to(uint8_t* out, size_t expected) {
    const uint8_t* data = take(expected, out);
    if (data != out && expected != 0) {
      std::memcpy(out, data, expected);
    }
  }

  /// @throws FormatError unless all streams were taken.
  void finish() const {
    if (at_ != body_.size) {
      throw FormatError(std::to_string(body_.size - at_) + " bytes behind the last stream of a chunk");
    }
  }

 private:
  /// The next stream if it is stored as it is; otherwise, no bytes, and `frame_` has it.
  Bytes next(size_t expected) {
    if (body_.size - at_ < kStreamHead) {
      throw FormatError("a chunk with too few streams");
    }
    const uint8_t how = body_.data[at_];
    const size_t length = load<uint32_t>(body_.data + at_ + 1);
    at_ += kStreamHead;
    const size_t there = std::min(length, body_.size - at_);
    if (there != length || how > kFrame) {
      throw FormatError(
          "a stream of " + std::to_string(length) + " bytes, of which " + std::to_string(there) +
          " are there, stored as " + std::to_string(how));
    }
    const uint8_t* data = body_.data + at_;
    at_ += length;
    if (how == kFrame) {
      frame_ = {data, length};
      return {};
    }
    if (length != expected) {
      throw FormatError("a stream of " + std::to_string(length) + " bytes, expected " + std::to_string(expected));
    }
    return {data, length};
  }

  Bytes body_;
  Decompressor& decompressor_;
  Bytes frame_;
  size_t at_ = 0;
};

template <typename T>
void ChunkDecoder::join(Streams& streams, uint8_t* out, size_t count) {
  if constexpr (sizeof(T) == 1) {
    streams.take_to(out, count);
  } else {
    const uint8_t* planes[sizeof(T)];
    for (size_t plane = 0; plane < sizeof(T); ++plane) {
      planes[plane] = streams.take(count, room_.get() + plane * count);
    }
    for (size_t i = 0; i < count; ++i) {
      T element = 0;
      for (size_t plane = 0; plane < sizeof(T); ++plane) {
        element = static_cast<T>(element | (T{planes[plane][i]} << (8 * plane)));
      }
      store(out + i * sizeof(T), element);
    }
  }
}

template <typename T, bool kFloating>
void ChunkDecoder::near(Streams& streams, const Encoding& encoding, const uint8_t* base, uint8_t* out, size_t size) {
  const size_t count = size / sizeof(T);
  const auto with_codes = [&](auto bits) {
    constexpr unsigned kBits = decltype(bits)::value;
    const size_t packed_size = Codes<kBits>::bytes_of(count);
    const uint8_t* packed = streams.take(packed_size, room_.get());
    const Codes<kBits> codes(packed, count);
    const size_t escaped = codes.escapes();
    const uint8_t* planes[sizeof(T)];
    for (size_t plane = 0; plane < sizeof(T); ++plane) {
      planes[plane] = streams.take(escaped, room_.get() + packed_size + plane * escaped);
    }
    apply_codes<T, kFloating, kBits>(packed, base, out, count);
    apply_escapes<T, kFloating, kBits>(codes, planes, base, out, count);
  };
  if (encoding.bits == 2) {
    with_codes(std::integral_constant<unsigned, 2>());
  } else if (encoding.bits == 4) {
    with_codes(std::integral_constant<unsigned, 4>());
  } else {
    join<T>(streams, out, count);
    apply_all<T, kFloating>(out, base, out, count);
  }
}

void ChunkDecoder::decode(const Encoding& encoding, Bytes body, const uint8_t* base, uint8_t* out, size_t size) {
  if (!room_) { // codes, and the planes of a chunk
    room_.reset(new uint8_t[kChunk + kChunk / 2]); // NOLINT: not make_unique, which would write to it
  }
  Streams streams(body, decompressor_);
  const size_t whole = size / encoding.width * encoding.width;
  with_element(encoding.width, [&](auto element) {
    using T = decltype(element);
    if (encoding.kind == Encoding::Kind::Planes) {
      join<T>(streams, out, size / sizeof(T));
    } else if (encoding.floating) {
      near<T, true>(streams, encoding, base, out, size);
    } else {
      near<T, false>(streams, encoding, base, out, size);
    }
  });
  streams.take_to(out + whole, size - whole);
  streams.finish();
}

void decode(
    const Encoding& encoding,
    uint64_t size,
    uint64_t stored,
    const std::function<void(uint8_t*, size_t, uint64_t)>& read,
    const std::function<void(uint8_t*, size_t, uint64_t)>& base,
    const std::function<void(const uint8_t*, size_t)>& use) {
  const bool raw = encoding.kind == Encoding::Kind::Raw;
  if (raw && stored != size) {
    throw FormatError(std::to_string(stored) + " bytes, expected " + std::to_string(size));
  }
  const size_t most = static_cast<size_t>(std::min<uint64_t>(size, kChunk));
  std::vector<uint8_t> out(most);
  std::vector<uint8_t> of_base(encoding.kind == Encoding::Kind::Near ? most : 0);
  std::vector<uint8_t> body;
  ChunkDecoder chunks;
  uint64_t at = 0;
  for (uint64_t start = 0; start < size; start += kChunk) {
    const size_t expected = static_cast<size_t>(std::min<uint64_t>(size - start, kChunk));
    if (raw) {
      read(out.data(), expected, start);
      at += expected;
    } else {
      uint8_t head[kChunkHead] = {};
      if (stored - at >= kChunkHead) {
        read(head, kChunkHead, at);
        at += kChunkHead;
      }
      const size_t length = load<uint32_t>(head);
      if (length == 0 || length > stored - at || length > kMostStored) {
        throw FormatError(
            "a chunk of " + std::to_string(length) + " bytes at byte " + std::to_string(start) + ", of which " +
            std::to_string(stored - at) + " are there");
      }
      body.resize(length);
      read(body.data(), length, at);
      at += length;
      if (!of_base.empty()) {
        base(of_base.data(), expected, start);
      }
      chunks.decode(encoding, {body.data(), length}, of_base.data(), out.data(), expected);
    }
    use(out.data(), expected);
  }
  if (at != stored) {
    throw FormatError(std::to_string(stored - at) + " bytes behind the last chunk");
  }
}

} // namespace blobstore::internal
