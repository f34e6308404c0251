#include "codec/decoder.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/frames.h"
#include "format/format_error.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

constexpr size_t kChunk = size_t{1} << 20; // bytes of a content that are encoded together
constexpr size_t kMostOfChunk = kChunk + (size_t{1} << 16); // stored; what is not compressed has heads of streams besides
constexpr size_t kLengthSize = 4;
constexpr size_t kHeadSize = 5; // of a stream: how it is stored, and its length
constexpr uint8_t kPlain = 0;
constexpr uint8_t kFrame = 1; // of zstd

using Bytes = std::vector<uint8_t>;

uint32_t length_at(const uint8_t* bytes) {
  return bytes[0] | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24;
}

/// The streams of a chunk, one behind the other.
class Streams {
 public:
  Streams(const uint8_t* bytes, size_t size) : bytes_(bytes), size_(size) {}

  /// Write the next stream, which must have `size` bytes. @throws FormatError.
  void take(uint8_t* out, size_t size) {
    if (size_ - at_ < kHeadSize) {
      throw_format_error("a chunk with too few streams");
    }
    const uint8_t how = bytes_[at_];
    const size_t length = length_at(bytes_ + at_ + 1);
    at_ += kHeadSize;
    if (length > size_ - at_ || how > kFrame) {
      throw_format_error("a stream of {} bytes, of which {} are there, stored as {}", length, size_ - at_, uint64_t{how});
    }
    const uint8_t* const stored = bytes_ + at_;
    at_ += length;
    if (how == kPlain) {
      if (length != size) {
        throw_format_error("a stream of {} bytes, expected {}", length, size);
      }
      if (size > 0) {
        std::memcpy(out, stored, size);
      }
    } else if (blobstore_decode_frame(out, size, stored, length) == 0) {
      throw_format_error("a stream that is no frame of zstd with {} bytes", size);
    }
  }

  void finish() const {
    if (at_ != size_) {
      throw_format_error("{} bytes behind the last stream of a chunk", size_ - at_);
    }
  }

 private:
  const uint8_t* bytes_;
  size_t size_;
  size_t at_ = 0;
};

/// Decodes chunks one by one, in memory that all of them use.
class ChunkDecoder {
 public:
  ChunkDecoder(const Encoding& encoding, size_t most) : encoding_(encoding), out_(most), plane_(most) {}

  /// The bytes of a chunk, until the next call.
  const uint8_t* decode(Streams streams, const uint8_t* base, size_t size) {
    const size_t width = encoding_.width;
    const size_t count = size / width;
    if (encoding_.kind == Encoding::Kind::Planes) {
      join(streams, count, width, out_.data());
    } else if (width == 1) {
      differences<uint8_t>(streams, count, base);
    } else if (width == 2) {
      differences<uint16_t>(streams, count, base);
    } else if (width == 4) {
      differences<uint32_t>(streams, count, base);
    } else {
      differences<uint64_t>(streams, count, base);
    }
    streams.take(out_.data() + count * width, size - count * width);
    streams.finish();
    return out_.data();
  }

 private:
  /// Read the bytes of elements, all first ones, then all second ones, and so on.
  void join(Streams& streams, size_t count, size_t width, uint8_t* out) {
    for (size_t place = 0; place < width; ++place) {
      streams.take(plane_.data(), count);
      for (size_t i = 0; i < count; ++i) {
        out[i * width + place] = plane_[i];
      }
    }
  }

  template <typename Number>
  void differences(Streams& streams, size_t count, const uint8_t* base) {
    numbers<Number>(streams, count);
    constexpr Number kSign = static_cast<Number>(Number{1} << (8 * sizeof(Number) - 1));
    for (size_t i = 0; i < count; ++i) {
      const Number number = load<Number>(out_.data() + i * sizeof(Number));
      const Number negative = static_cast<Number>(0 - (number & 1));
      Number value = static_cast<Number>((number >> 1) ^ negative);
      Number of_base = load<Number>(base + i * sizeof(Number));
      if (encoding_.floating) {
        // floats as integers without a sign that are ordered as the values are, and back
        of_base = (of_base & kSign) != 0 ? static_cast<Number>(~of_base) : static_cast<Number>(of_base | kSign);
        value = static_cast<Number>(value + of_base);
        value = (value & kSign) != 0 ? static_cast<Number>(value ^ kSign) : static_cast<Number>(~value);
      } else {
        value = static_cast<Number>(value + of_base);
      }
      store(out_.data() + i * sizeof(Number), value);
    }
  }

  /// Read numbers without a sign into `out_`.
  template <typename Number>
  void numbers(Streams& streams, size_t count) {
    if (encoding_.bits == 0) {
      join(streams, count, sizeof(Number), out_.data());
      return;
    }
    const unsigned bits = encoding_.bits;
    const unsigned most = (1u << bits) - 1;
    const size_t each = 8 / bits;
    codes_.resize((count + each - 1) / each);
    streams.take(codes_.data(), codes_.size());
    const auto code = [&](size_t i) { return codes_[i / each] >> (i % each * bits) & most; };
    size_t escaped = 0;
    for (size_t i = 0; i < count; ++i) {
      escaped += code(i) == most ? 1 : 0;
    }
    large_.resize(escaped * sizeof(Number));
    join(streams, escaped, sizeof(Number), large_.data());
    for (size_t i = 0, next = 0; i < count; ++i) {
      Number number = static_cast<Number>(code(i));
      if (number == most) {
        number = static_cast<Number>(load<Number>(large_.data() + next++ * sizeof(Number)) + most);
      }
      store(out_.data() + i * sizeof(Number), number);
    }
  }

  Encoding encoding_;
  Bytes out_;
  Bytes plane_;
  Bytes codes_; // short numbers, several in a byte
  Bytes large_; // those that are not short
};

} // namespace

std::optional<Encoding> read_encoding(std::string_view text) {
  constexpr std::string_view kPlanes = "planes:";
  constexpr std::string_view kNear = "near:";
  Encoding found;
  const auto take_width = [&](char digit) {
    found.width = static_cast<uint8_t>(digit - '0');
    return digit == '1' || digit == '2' || digit == '4' || digit == '8';
  };
  if (text == "raw") {
    return found;
  }
  if (text.size() == kPlanes.size() + 1 && text.substr(0, kPlanes.size()) == kPlanes) {
    found.kind = Encoding::Kind::Planes;
    return take_width(text.back()) ? std::optional(found) : std::nullopt;
  }
  if (text.size() != kNear.size() + 4 || text.substr(0, kNear.size()) != kNear || text[7] != ':') {
    return std::nullopt;
  }
  found.kind = Encoding::Kind::Near;
  found.floating = text[5] == 'f';
  found.bits = static_cast<uint8_t>(text[8] - '0');
  const bool known = take_width(text[6]) && (found.floating ? found.width > 1 : text[5] == 'u') &&
      (text[8] == '0' || text[8] == '2' || text[8] == '4');
  return known ? std::optional(found) : std::nullopt;
}

void decode(
    const Encoding& encoding,
    uint64_t size,
    uint64_t stored,
    const std::function<void(uint8_t*, size_t, uint64_t)>& read,
    const std::function<void(uint8_t*, size_t, uint64_t)>& base,
    const std::function<void(const uint8_t*, size_t)>& use) {
  if (encoding.kind == Encoding::Kind::Raw && stored != size) {
    throw_format_error("{} bytes, expected {}", stored, size);
  }
  const size_t most = static_cast<size_t>(std::min<uint64_t>(size, kChunk));
  Bytes of_base(encoding.kind == Encoding::Kind::Near ? most : 0);
  Bytes body;
  ChunkDecoder chunks(encoding, most);
  uint64_t at = 0;
  for (uint64_t start = 0; start < size; start += kChunk) {
    const size_t expected = static_cast<size_t>(std::min<uint64_t>(size - start, kChunk));
    if (encoding.kind == Encoding::Kind::Raw) {
      body.resize(expected);
      read(body.data(), expected, start);
      at += expected;
      use(body.data(), expected);
      continue;
    }
    uint8_t head[kLengthSize] = {};
    const bool has_head = stored - at >= kLengthSize;
    if (has_head) {
      read(head, kLengthSize, at);
      at += kLengthSize;
    }
    const size_t length = length_at(head);
    if (length == 0 || length > stored - at || length > kMostOfChunk) {
      throw_format_error("a chunk of {} bytes at byte {}, of which {} are there", length, start, stored - at);
    }
    body.resize(length);
    read(body.data(), length, at);
    at += length;
    if (encoding.kind == Encoding::Kind::Near) {
      base(of_base.data(), expected, start);
    }
    use(chunks.decode(Streams(body.data(), length), of_base.data(), expected), expected);
  }
  if (at != stored) {
    throw_format_error("{} bytes behind the last chunk", stored - at);
  }
}

} // namespace blobstore::internal
