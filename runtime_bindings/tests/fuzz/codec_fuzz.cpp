// Fuzzes the decoder of blobs: the first byte says the encoding, and a chunk follows. What it makes of a chunk is
// split into streams again and must come back.
#include "../encodings.h"
#include "codec/decoder.h"
#include "codec/streams.h"
#include "format/format_error.h"
#include "input.h"
#include "os/unaligned.h"

namespace {

using namespace blobstore::internal; // NOLINT: all that is tested is in there

constexpr size_t kSize = 3000;

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) {
    return 0;
  }
  static const std::vector<std::string> all = encodings(); // in the order of campaigns/fuzz/chunks.py
  const Encoding encoding = *read_encoding(all[data[0] % all.size()]);
  std::vector<uint8_t> base(kSize);
  for (size_t i = 0; i < kSize; ++i) {
    base[i] = static_cast<uint8_t>(i * 7);
  }
  std::vector<uint8_t> out(kSize);
  static ChunkDecoder decoder;
  static ChunkSplitter splitter;
  try {
    decoder.decode(encoding, {data + 1, size - 1}, base.data(), out.data(), kSize);
  } catch (const FormatError&) {
    return 0;
  }
  std::vector<uint8_t> stored;
  for (const Bytes& stream : splitter.split(encoding, {out.data(), kSize}, base.data())) {
    uint8_t head[5] = {};
    store(head + 1, static_cast<uint32_t>(stream.size));
    stored.insert(stored.end(), head, head + sizeof head);
    stored.insert(stored.end(), stream.data, stream.data + stream.size);
  }
  std::vector<uint8_t> again(kSize);
  decoder.decode(encoding, {stored.data(), stored.size()}, base.data(), again.data(), kSize);
  must(again == out);
  return 0;
}
