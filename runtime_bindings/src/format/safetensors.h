// Reading .safetensors files: 8 bytes with the length of a JSON header, the header, and the bytes of the tensors, which
// must follow each other without a gap. Accepts what Python's reader accepts, except that values which nothing uses may
// be nested 200 deep at most.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/layout.h>

namespace blobstore::internal {

struct SafetensorsEntry {
  std::string key;
  std::string dtype; // as the file spells it
  std::vector<uint64_t> sizes;
  std::optional<Layout> layout; // empty if a .ptd cannot describe the tensor: parts of a byte, or too large a size
  uint64_t start = 0; // in the file
  uint64_t end = 0;
};

/// The checked header of one file.
struct SafetensorsTable {
  std::vector<SafetensorsEntry> entries; // in the order of the header
  std::map<std::string, std::string> metadata;
};

/// Check the structure of a file. Memory is bounded by a small multiple of the header.
/// @throws Error InvalidFile.
SafetensorsTable read_safetensors(const std::string& path, const uint8_t* data, uint64_t size);

} // namespace blobstore::internal
