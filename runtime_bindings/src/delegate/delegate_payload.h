// What a delegate's payload says about the payload inside; docs/lowering.md has the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace blobstore {

/// How many bytes at the end of a key are replaced by a version.
constexpr size_t kVersionSize = 16;

struct DelegateConstant {
  std::string key;
  uint64_t nbytes = 0;
  uint32_t group = 0;
  bool packed = false; // whether the inner backend has a copy of its own once it is initialized
  std::vector<uint64_t> places; // where the end of the key stands in the inner payload
};

struct DelegatePayload {
  std::string inner;
  size_t size = 0; // of the inner payload, which comes first
  std::vector<DelegateConstant> constants;
};

/// @throws FormatError: this is no payload of ours, or it is damaged.
DelegatePayload read_delegate_payload(const uint8_t* data, size_t size);

} // namespace blobstore
