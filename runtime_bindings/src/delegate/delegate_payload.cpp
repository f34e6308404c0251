#include "delegate/delegate_payload.h"

#include <cstring>

#include "format/digest.h"
#include "format/flatbuffer.h"

namespace blobstore::internal {
namespace {

constexpr char kMagic[] = "BSDELEG1";
constexpr char kIdentifier[] = "BD01";
constexpr uint32_t kVersion = 1;
constexpr size_t kTail = 16; // length and magic

DelegateConstant read_constant(const FlatBuffer& buffer, uint64_t table, const uint8_t* data, size_t size) {
  DelegateConstant constant;
  constant.key = std::string(buffer.string(table, 0));
  constant.nbytes = buffer.u64_field(table, 1);
  constant.group = buffer.u32_field(table, 2);
  constant.packed = buffer.u8_field(table, 4) != 0;
  if (constant.key.size() < kVersionSize) {
    throw FormatError("a key is too short for a version");
  }
  const char* end = constant.key.data() + constant.key.size() - kVersionSize;
  const FlatVector packing = buffer.vector(table, 5, 1);
  constant.packing.assign(reinterpret_cast<const char*>(buffer.data() + packing.start), packing.count);
  const FlatVector places = buffer.vector(table, 3, 8);
  for (uint32_t i = 0; i < places.count; ++i) {
    const uint64_t at = places.start + 8ull * i;
    const uint64_t place = buffer.u32(at) | static_cast<uint64_t>(buffer.u32(at + 4)) << 32;
    if (place > size || size - place < kVersionSize || std::memcmp(data + place, end, kVersionSize) != 0) {
      throw FormatError("key '" + constant.key + "' is not where the description says");
    }
    constant.places.push_back(place);
  }
  return constant;
}

} // namespace

DelegatePayload read_delegate_payload(const uint8_t* data, size_t size) {
  if (size < kTail || std::memcmp(data + size - 8, kMagic, 8) != 0) {
    throw FormatError("the magic at its end is missing");
  }
  uint64_t length;
  std::memcpy(&length, data + size - kTail, sizeof length);
  if (length > size - kTail || length < 8) {
    throw FormatError("its description does not fit");
  }
  const uint8_t* start = data + size - kTail - length;
  if (std::memcmp(start + 4, kIdentifier, 4) != 0) {
    throw FormatError("its description has another identifier");
  }
  const FlatBuffer buffer(start, length);
  const uint64_t root = buffer.root();
  if (buffer.u32_field(root, 0) != kVersion) {
    throw FormatError("it was written by another version");
  }
  DelegatePayload payload;
  payload.inner = std::string(buffer.string(root, 1));
  payload.size = buffer.u64_field(root, 2);
  if (payload.size > size - kTail - length) {
    throw FormatError("the inner payload does not fit");
  }
  const FlatVector expected = buffer.vector(root, 4, 1);
  const Digest found = digest(data, payload.size);
  if (expected.count != found.size() || std::memcmp(start + expected.start, found.data(), found.size()) != 0) {
    throw FormatError("the inner payload has another digest than was recorded");
  }
  payload.digest = found;
  const FlatVector constants = buffer.vector(root, 3, 4);
  for (uint32_t i = 0; i < constants.count; ++i) {
    payload.constants.push_back(read_constant(buffer, buffer.element(constants, i), data, payload.size));
  }
  return payload;
}

} // namespace blobstore::internal
