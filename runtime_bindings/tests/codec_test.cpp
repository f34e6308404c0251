// Encoded blobs: what they are, that they come back, and that damaged ones are errors. Takes no arguments, and ends
// with 1 if something is wrong.

#include <functional>
#include <random>

#include "codec/decoder.h"
#include "codec/streams.h"
#include "encodings.h"
#include "format/format_error.h"
#include "helpers.h"

namespace {

using namespace blobstore::internal; // NOLINT: all that is tested is in there
using Blob = std::vector<uint8_t>;

/// A number of so many bytes.
void add_number(Blob& to, uint64_t number, size_t bytes) {
  for (size_t byte = 0; byte < bytes; ++byte) {
    to.push_back(static_cast<uint8_t>(number >> (8 * byte)));
  }
}

/// A zstd frame whose blocks hold the bytes as they are.
Blob frame_of(Bytes data) {
  constexpr size_t kBlock = size_t{1} << 17;
  Blob frame = {0x28, 0xb5, 0x2f, 0xfd, 0xa0}; // one segment, and four bytes that say its size
  add_number(frame, data.size, 4);
  for (size_t start = 0; start == 0 || start < data.size; start += kBlock) {
    const size_t size = std::min(kBlock, data.size - start);
    add_number(frame, (size << 3) | (start + size == data.size ? 1 : 0), 3);
    frame.insert(frame.end(), data.data + start, data.data + start + size);
  }
  return frame;
}

/// The blob with every second stream in a frame, where there is zstd.
Blob encoded(const Blob& data, const std::string& text, const Blob& base) {
  const Encoding encoding = *read_encoding(text);
  ChunkSplitter splitter;
  Blob stored;
  for (size_t start = 0; start < data.size(); start += kChunk) {
    const Bytes chunk = {data.data() + start, std::min(kChunk, data.size() - start)};
    Blob body;
    bool framed = false;
    for (const Bytes& stream : splitter.split(encoding, chunk, base.empty() ? nullptr : base.data() + start)) {
      framed = !framed && zstd_version() != nullptr && stream.size != 0;
      const Blob bytes = framed ? frame_of(stream) : Blob(stream.data, stream.data + stream.size);
      body.push_back(framed ? 1 : 0);
      add_number(body, bytes.size(), 4);
      body.insert(body.end(), bytes.begin(), bytes.end());
    }
    add_number(stored, body.size(), 4);
    stored.insert(stored.end(), body.begin(), body.end());
  }
  return stored;
}

Blob decoded(const Blob& stored, const std::string& text, size_t size, const Blob& base) {
  Blob out;
  const auto reader = [](const Blob& from) {
    return [&from](uint8_t* to, size_t count, uint64_t at) {
      CHECK(at <= from.size() && count <= from.size() - at);
      std::memcpy(to, from.data() + at, count);
    };
  };
  decode(
      *read_encoding(text), size, stored.size(), reader(stored), reader(base), [&](const uint8_t* data, size_t count) {
        out.insert(out.end(), data, data + count);
      });
  return out;
}

/// What the error says; empty if there is none.
std::string error_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const FormatError& error) {
    return error.what();
  }
  return std::string();
}

/// Bytes that are partly random and partly not.
Blob random_blob(size_t size, std::mt19937_64& random) {
  Blob blob(size);
  for (size_t i = 0; i < size; ++i) {
    blob[i] = i % 2 == 0 || i / 4096 % 3 == 0 ? static_cast<uint8_t>(random()) : static_cast<uint8_t>(random() % 3);
  }
  return blob;
}

/// Another blob, most of whose bytes are the same or a little larger.
Blob near_to(const Blob& base, std::mt19937_64& random) {
  Blob blob = base;
  for (uint8_t& byte : blob) {
    const uint64_t dice = random() % 64;
    if (dice < 4) {
      byte = static_cast<uint8_t>(dice == 0 ? random() : byte + dice - 2);
    }
  }
  return blob;
}

void test_blobs_come_back() {
  std::mt19937_64 random(1); // NOLINT(bugprone-random-generator-seed): a failure comes again
  for (const size_t size : {size_t{0}, size_t{1}, size_t{7}, size_t{8}, size_t{4095}, size_t{70001}, kChunk + 13}) {
    const Blob data = random_blob(size, random);
    for (const std::string& text : encodings()) {
      for (const Blob& base : {near_to(data, random), Blob(size, 0x80), Blob()}) {
        if (base.size() == size || text.rfind("near", 0) != 0) {
          CHECK(decoded(encoded(data, text, base), text, size, base) == data);
        }
      }
    }
    CHECK(decoded(data, "raw", size, {}) == data);
  }
}

void test_damage_is_an_error_or_other_bytes() {
  std::mt19937_64 random(3); // NOLINT(bugprone-random-generator-seed): a failure comes again
  for (const std::string& text : encodings()) {
    const Blob base = random_blob(600, random);
    const Blob data = near_to(base, random);
    const Blob stored = encoded(data, text, base);
    for (size_t size = 0; size < stored.size(); ++size) {
      CHECK(!error_of([&] { decoded(Blob(stored.begin(), stored.begin() + size), text, 600, base); }).empty());
    }
    for (int times = 0; times < 2000; ++times) {
      Blob damaged = stored;
      for (uint64_t changes = random() % 4; changes-- > 0;) {
        damaged[random() % damaged.size()] = static_cast<uint8_t>(random());
      }
      error_of([&] { CHECK(decoded(damaged, text, 600, base).size() == 600); });
    }
    Blob longer = stored;
    longer.push_back(0);
    CHECK(error_of([&] { decoded(longer, text, 600, base); }) == "1 bytes behind the last chunk");
    CHECK(!error_of([&] { decoded(stored, text, 601, near_to(random_blob(601, random), random)); }).empty());
  }
  CHECK(error_of([] { decoded({1, 2, 3}, "raw", 4, {}); }) == "3 bytes, expected 4");
}

void test_lengths_are_checked_before_memory_is_taken() {
  const auto none = [](uint8_t*, size_t, uint64_t) {};
  const auto head = [](uint8_t* out, size_t count, uint64_t) {
    CHECK(count <= kMostStored);
    std::memset(out, 0x7f, count);
  };
  const auto use = [](const uint8_t*, size_t) {};
  CHECK(!error_of([&] { decode(*read_encoding("planes:1"), 1, uint64_t{1} << 40, head, none, use); }).empty());
}

/// What zstd 1.5.7 made of some text at level 19.
Blob golden_frame() {
  const std::string digits =
      "28b52ffd60b702c5030082c71313b0a9036fd06109241525d34e3225211a5a320ff65b3c9967bf633c76eed8793e155f"
      "db273292ef55b5ff94f981f558bad6472b0a0e6957269a3aa72dd2ebab6965ba1290148431282630c8b008473aa8204a"
      "b7bf01a05de61128048fdf6b3b516288905ec045f771fb0499301107dd737002c814";
  Blob frame;
  for (size_t i = 0; i < digits.size(); i += 2) {
    frame.push_back(static_cast<uint8_t>(std::stoul(digits.substr(i, 2), nullptr, 16)));
  }
  return frame;
}

void test_frames() {
  std::string text;
  for (int number = 0; number < 60; ++number) {
    text += "layer." + std::to_string(number * number % 97) + ".weight ";
  }
  const Blob frame = golden_frame();
  Decompressor decompressor;
  Blob out(2000);
  const auto decompress = [&](const Blob& from, size_t expected) {
    return error_of([&] { decompressor.decompress(from.data(), from.size(), out.data(), expected); });
  };
  if (zstd_version() == nullptr) {
    CHECK(decompress({1, 2, 3}, 3).find("without zstd") != std::string::npos);
    return;
  }
  CHECK(decompress(frame, text.size()).empty());
  CHECK(std::equal(text.begin(), text.end(), out.begin()));
  CHECK(decompress(frame, 950) == "a stream that does not hold 950 bytes");
  CHECK(!decompress(Blob(frame.begin(), frame.end() - 1), text.size()).empty());
  Blob longer = frame;
  longer.push_back(0);
  CHECK(!decompress(longer, text.size()).empty());
}

} // namespace

int main() {
  test_blobs_come_back();
  test_damage_is_an_error_or_other_bytes();
  test_lengths_are_checked_before_memory_is_taken();
  test_frames();
}
