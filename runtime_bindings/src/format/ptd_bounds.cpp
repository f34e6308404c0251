#include "format/ptd_bounds.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

namespace blobstore::internal {
namespace {

/// Bytes of a file in a message, which a NUL would end.
std::string visible(std::string_view bytes) {
  std::string text(bytes);
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

/// What a file that is no .ptd is, of the kinds that are often taken for one, and what to do; empty if unknown.
const char* other_kind(std::string_view head) {
  if (head.rfind("version https://git-lfs", 0) == 0) {
    return ": this is a pointer of Git LFS; git lfs pull fetches the file";
  }
  if (head[8] == '{' && head[6] == 0 && head[7] == 0) { // the length of a JSON object, and its brace
    return ": this is a .safetensors; blobstore convert makes a .ptd of it";
  }
  return head.substr(4, 2) == "ET" ? ": this is a program, a .pte" : "";
}

} // namespace

uint64_t load_u64(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

PtdBounds read_bounds(const uint8_t* data, uint64_t size) {
  if (size < kPtdFieldsStart + kPtdFieldsSize) {
    throw_format_error("{} bytes are too few for a .ptd", size);
  }
  const std::string_view identifier(reinterpret_cast<const char*>(data) + 4, 4);
  if (identifier != "FT01") {
    const std::string_view head(reinterpret_cast<const char*>(data), kPtdFieldsStart + kPtdFieldsSize);
    throw_format_error(
        "not a .ptd: expected the identifier 'FT01', found '{}'{}", visible(identifier), other_kind(head));
  }
  const std::string_view magic(reinterpret_cast<const char*>(data) + kPtdFieldsStart, 4);
  if (magic != "FH01") {
    throw_format_error("expected the header magic 'FH01', found '{}'", visible(magic));
  }
  uint32_t length;
  std::memcpy(&length, data + 12, sizeof length);
  if (length < kPtdFieldsSize) {
    throw_format_error("header length {} is below 40", length);
  }
  const uint64_t offset = load_u64(data + 16);
  const uint64_t flatbuffer_size = load_u64(data + 24);
  const uint64_t base = load_u64(data + 32);
  const uint64_t data_size = load_u64(data + 40);
  if (offset < kPtdFieldsStart + kPtdFieldsSize || offset > base || flatbuffer_size > base - offset) {
    throw_format_error(
        "flatbuffer of {} bytes at {} does not lie between the header and the segment base {}",
        flatbuffer_size,
        offset,
        base);
  }
  if (base > size || data_size > size - base) {
    throw_format_error(
        "truncated: {} bytes of segments at {} are announced, the file has {} bytes", data_size, base, size);
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
      throw_format_error(
          "segment {} of {} bytes at {} is not within the {} bytes of segments",
          i,
          size,
          offset,
          bounds.segment_data_size);
    }
    segments[i].start = bounds.segment_base + offset;
    segments[i].size = size;
  }
  std::vector<uint32_t> order = order_in_file(segments);
  order.erase(
      std::remove_if(order.begin(), order.end(), [&](uint32_t i) { return segments[i].size == 0; }), order.end());
  for (size_t i = 1; i < order.size(); ++i) {
    const PtdSegment& left = segments[order[i - 1]];
    if (left.start + left.size > segments[order[i]].start) {
      throw_format_error("segments {} and {} overlap", order[i - 1], order[i]);
    }
  }
  return segments;
}

std::vector<uint32_t> order_in_file(const std::vector<PtdSegment>& segments) {
  std::vector<uint32_t> order(segments.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::tie(segments[a].start, a) < std::tie(segments[b].start, b);
  });
  return order;
}

} // namespace blobstore::internal
