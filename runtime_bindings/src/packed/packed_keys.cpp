#include "packed/packed_keys.h"

#include "format/digest.h"
#include "os/text.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

[[noreturn]] void invalid(const std::string& path, const char* reason) {
  throw_error_in(ErrorKind::InvalidFile, path, "not a file of packed weights: {}", reason);
}

size_t count_sources(const std::vector<std::string>& keys) {
  size_t count = 0;
  for (const std::string& key : keys) {
    count += key.empty() ? 0 : 1;
  }
  return count;
}

} // namespace

std::string encode_keys(const PackedKeys& keys) {
  std::string text;
  const auto put = [&](const std::string& part) {
    uint8_t size[4];
    store(size, static_cast<uint32_t>(part.size()));
    text.append(reinterpret_cast<const char*>(size), sizeof size);
    text += part;
  };
  for (const auto& [entry, sources] : keys) {
    put(entry);
    put(std::string(sources.size(), '\0'));
    for (const std::string& source : sources) {
      put(source);
    }
  }
  return text;
}

PackedKeys decode_keys(const std::string& path, const uint8_t* data, size_t size) {
  PackedKeys keys;
  size_t at = 0;
  const auto take = [&]() -> std::string {
    if (size - at < 4 || load<uint32_t>(data + at) > size - at - 4) {
      invalid(path, "its keys do not fit");
    }
    const auto length = load<uint32_t>(data + at);
    at += 4 + size_t{length};
    return std::string(reinterpret_cast<const char*>(data + at - length), length);
  };
  while (at < size) {
    std::vector<std::string>& sources = keys[take()];
    const size_t count = take().size();
    sources.clear();
    for (size_t i = 0; i < count; ++i) {
      sources.push_back(take());
    }
  }
  return keys;
}

size_t state_size(const PackedKeys& keys) {
  size_t sources = 0;
  for (const auto& [entry, of_entry] : keys) {
    sources += count_sources(of_entry);
  }
  return 16 + sources * sizeof(Digest);
}

} // namespace blobstore::internal
