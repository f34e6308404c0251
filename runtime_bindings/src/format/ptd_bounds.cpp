#include "format/ptd_bounds.h"

#include <algorithm>
#include <cstring>

namespace blobstore::internal {

uint64_t load_u64(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

PtdBounds read_bounds(const uint8_t* data, uint64_t size) {
  if (size < kPtdFieldsStart + kPtdFieldsSize) {
    throw FormatError(number(size) + " bytes are too few for a .ptd");
  }
  const std::string_view identifier(reinterpret_cast<const char*>(data) + 4, 4);
  if (identifier != "FT01") {
    throw FormatError("not a .ptd: expected the identifier 'FT01', found " + quoted(identifier));
  }
  const std::string_view magic(reinterpret_cast<const char*>(data) + kPtdFieldsStart, 4);
  if (magic != "FH01") {
    throw FormatError("expected the header magic 'FH01', found " + quoted(magic));
  }
  uint32_t length;
  std::memcpy(&length, data + 12, sizeof length);
  if (length < kPtdFieldsSize) {
    throw FormatError("header length " + number(length) + " is below 40");
  }
  const uint64_t offset = load_u64(data + 16);
  const uint64_t flatbuffer_size = load_u64(data + 24);
  const uint64_t base = load_u64(data + 32);
  const uint64_t data_size = load_u64(data + 40);
  if (offset < kPtdFieldsStart + kPtdFieldsSize || offset > base || flatbuffer_size > base - offset) {
    throw FormatError(
        "flatbuffer of " + number(flatbuffer_size) + " bytes at " + number(offset) +
        " does not lie between the header and the segment base " + number(base));
  }
  if (base > size || data_size > size - base) {
    throw FormatError(
        "truncated: " + number(data_size) + " bytes of segments at " + number(base) + " are announced, the file has " +
        number(size) + " bytes");
  }
  return {offset + flatbuffer_size, base, data_size};
}

std::vector<PtdSegment> read_segments(const FlatBuffer& buffer, uint64_t root, const PtdBounds& bounds) {
  const FlatVector vector = buffer.vector(root, 1, 4);
  std::vector<PtdSegment> segments(vector.count);
  for (uint32_t i = 0; i < vector.count; ++i) {
    const uint64_t table = buffer.element(vector, i);
    const uint64_t offset = buffer.u64_field(table, 0);
    const uint64_t size = buffer.u64_field(table, 1);
    if (offset > bounds.segment_data_size || size > bounds.segment_data_size - offset) {
      throw FormatError(
          "segment " + number(i) + " of " + number(size) + " bytes at " + number(offset) + " is not within the " +
          number(bounds.segment_data_size) + " bytes of segments");
    }
    segments[i].start = bounds.segment_base + offset;
    segments[i].size = size;
  }
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < segments.size(); ++i) {
    if (segments[i].size != 0) {
      order.push_back(i);
    }
  }
  std::stable_sort(
      order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return segments[a].start < segments[b].start; });
  for (size_t i = 1; i < order.size(); ++i) {
    const PtdSegment& left = segments[order[i - 1]];
    if (left.start + left.size > segments[order[i]].start) {
      throw FormatError("segments " + number(order[i - 1]) + " and " + number(order[i]) + " overlap");
    }
  }
  return segments;
}

} // namespace blobstore::internal
