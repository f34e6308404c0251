#include "packed/packed_keys.h"

#include "format/digest.h"
#include "os/text.h"
#include "packed/coding.h"

namespace blobstore::internal {

void throw_not_packed(const std::string& path, const std::string& reason) {
  throw_error_in(ErrorKind::InvalidFile, path, "not a file of packed weights: {}", reason);
}

std::string encode_keys(const PackedKeys& keys) {
  Encoder encoder;
  const auto put = [&](const std::string& part) {
    encoder.value(static_cast<uint32_t>(part.size()));
    encoder.put(part.data(), part.size());
  };
  for (const auto& [entry, sources] : keys) {
    put(entry);
    put(std::string(sources.size(), '\0'));
    for (const std::string& source : sources) {
      put(source);
    }
  }
  return std::move(encoder.bytes);
}

PackedKeys decode_keys(const std::string& path, const uint8_t* data, size_t size) {
  PackedKeys keys;
  Decoder decoder(data, 0, size);
  const auto take = [&] { return decoder.text(decoder.value<uint32_t>()); };
  while (decoder.whole() && !decoder.at_end()) {
    std::vector<std::string>& sources = keys[std::string(take())];
    const size_t count = take().size();
    sources.clear();
    for (size_t i = 0; i < count && decoder.whole(); ++i) {
      sources.emplace_back(take());
    }
  }
  if (!decoder.whole()) {
    throw_not_packed(path, "its keys do not fit");
  }
  return keys;
}

size_t digests_of(const std::vector<std::string>& sources) {
  size_t count = 1;
  for (const std::string& key : sources) {
    count += key.empty() ? 0 : 1;
  }
  return count;
}

size_t state_size(const PackedKeys& keys) {
  size_t digests = 0;
  for (const auto& [entry, sources] : keys) {
    digests += digests_of(sources);
  }
  return kStateHead + digests * sizeof(Digest);
}

} // namespace blobstore::internal
