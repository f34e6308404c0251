// The description that follows the inner backend's payload; docs/lowering.md specifies the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "format/constants.h"
#include "format/digest.h"

namespace blobstore::internal {

/// A blob that the inner backend requests. Several constants may be one blob, which operators pack in different ways.
struct DelegateConstant {
  std::string key;
  uint64_t nbytes = 0;
  uint32_t group = 0;
  bool packed = false; // whether the inner backend has its own copy after it is initialized
  std::vector<uint64_t> places; // positions of the end of the key in the inner payload
  std::string packing; // a digest of what else decides how it is packed; empty if the writer did not say
  std::vector<uint64_t> holes; // positions of the blob in the inner payload, as the inner backend gets it
};

/// Where a blob lies in the inner payload.
struct Hole {
  uint64_t start = 0;
  size_t constant = 0; // an index
};

struct DelegatePayload {
  std::string inner;
  size_t size = 0; // of the inner payload, which comes first, without holes
  Digest digest{}; // of the inner payload, without holes
  std::vector<DelegateConstant> constants;
  std::vector<Hole> holes; // of all constants, in order; they do not overlap
  uint64_t filled = 0; // size of the inner payload with holes
};

/// Read and check a description, and compare the inner payload with its digest.
/// @throws FormatError: the payload has no description, or is damaged.
DelegatePayload read_delegate_payload(const uint8_t* data, size_t size);

} // namespace blobstore::internal
