#include "delegate/delegate_payload.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>

#include "format/constants.h"
#include "format/digest.h"
#include "format/flatbuffer.h"

namespace blobstore::internal {
namespace {

constexpr size_t kTail = 16; // length and magic

uint64_t read_u64(const FlatBuffer& buffer, const FlatVector& vector, uint32_t index) {
  const uint64_t at = vector.start + 8ull * index;
  return buffer.u32(at) | static_cast<uint64_t>(buffer.u32(at + 4)) << 32;
}

DelegateConstant read_constant(const FlatBuffer& buffer, uint64_t table, const uint8_t* data, size_t size) {
  DelegateConstant constant;
  constant.key = std::string(buffer.string(table, 0));
  constant.nbytes = buffer.u64_field(table, 1);
  constant.group = buffer.u32_field(table, 2);
  constant.packed = buffer.u8_field(table, 4) != 0;
  const FlatVector packing = buffer.vector(table, 5, 1);
  constant.packing.assign(reinterpret_cast<const char*>(buffer.data() + packing.start), packing.count);
  const FlatVector places = buffer.vector(table, 3, 8);
  if (places.count != 0 && constant.key.size() < kKeyVersionSize) {
    throw_format_error("a key is too short for a version");
  }
  for (uint32_t i = 0; i < places.count; ++i) {
    const char* end = constant.key.data() + constant.key.size() - kKeyVersionSize;
    const uint64_t place = read_u64(buffer, places, i);
    if (place > size || size - place < kKeyVersionSize || std::memcmp(data + place, end, kKeyVersionSize) != 0) {
      throw_format_error("key '{}' is not where the description says", constant.key);
    }
    constant.places.push_back(place);
  }
  const FlatVector holes = buffer.vector(table, 6, 8);
  if (holes.count > kMostHoles) {
    throw_format_error("key '{}' has too many holes", constant.key);
  }
  for (uint32_t i = 0; i < holes.count; ++i) {
    constant.holes.push_back(read_u64(buffer, holes, i));
  }
  return constant;
}

/// Put the holes of all constants in order, and check that the payload consists of them and of what is recorded.
void read_holes(DelegatePayload& payload, uint64_t filled) {
  for (size_t i = 0; i < payload.constants.size(); ++i) {
    for (const uint64_t start : payload.constants[i].holes) {
      payload.holes.push_back({start, i});
    }
  }
  payload.filled = payload.size;
  if (payload.holes.empty() && filled == 0) {
    return;
  }
  std::set<std::string> keys;
  for (const DelegateConstant& constant : payload.constants) {
    if (!keys.insert(constant.key).second) {
      throw_format_error("key '{}' occurs twice", constant.key);
    }
    if (!constant.places.empty()) { // they would move when holes are filled
      throw_format_error("key '{}' is in a payload that has holes", constant.key);
    }
  }
  std::sort(payload.holes.begin(), payload.holes.end(), [](const Hole& one, const Hole& other) {
    return one.start < other.start;
  });
  uint64_t end = 0;
  for (const Hole& hole : payload.holes) {
    const uint64_t nbytes = payload.constants[hole.constant].nbytes;
    if (hole.start < end || nbytes == 0 || hole.start > filled || nbytes > filled - hole.start) {
      throw_format_error(
          "a hole of key '{}' is empty, overlaps another or is outside", payload.constants[hole.constant].key);
    }
    end = hole.start + nbytes;
    payload.filled += nbytes;
  }
  if (payload.filled != filled) {
    throw_format_error("the inner payload and its holes do not have the size that was recorded");
  }
}

} // namespace

DelegatePayload read_delegate_payload(const uint8_t* data, size_t size) {
  if (size < kTail || std::memcmp(data + size - 8, kPayloadMagic, 8) != 0) {
    throw_format_error("the magic at its end is missing");
  }
  uint64_t length;
  std::memcpy(&length, data + size - kTail, sizeof length);
  if (length > size - kTail || length < 8) {
    throw_format_error("its description does not fit");
  }
  const uint8_t* start = data + size - kTail - length;
  if (std::memcmp(start + 4, kPayloadIdentifier, 4) != 0) {
    throw_format_error("its description has another identifier");
  }
  const FlatBuffer buffer(start, length);
  const uint64_t root = buffer.root();
  if (buffer.u32_field(root, 0) != kPayloadVersion) {
    throw_format_error("it was written by another version");
  }
  DelegatePayload payload;
  payload.inner = std::string(buffer.string(root, 1));
  payload.size = buffer.u64_field(root, 2);
  if (payload.size > size - kTail - length) {
    throw_format_error("the inner payload does not fit");
  }
  const FlatVector expected = buffer.vector(root, 4, 1);
  const Digest found = digest(data, payload.size);
  if (expected.count != found.size() || std::memcmp(start + expected.start, found.data(), found.size()) != 0) {
    throw_format_error("the inner payload has another digest than was recorded");
  }
  payload.digest = found;
  const FlatVector constants = buffer.vector(root, 3, 4);
  for (uint32_t i = 0; i < constants.count; ++i) {
    payload.constants.push_back(read_constant(buffer, buffer.element(constants, i), data, payload.size));
  }
  read_holes(payload, buffer.u64_field(root, 5));
  return payload;
}

} // namespace blobstore::internal
