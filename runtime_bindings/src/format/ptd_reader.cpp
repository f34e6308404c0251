#include "format/ptd_reader.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include <blobstore/error.h>

#include "format/flatbuffer.h"
#include "format/ptd_bounds.h"
#include "format/ptd_manifest.h"
#include "format/text_hash.h"
#include "format/utf8.h"

namespace blobstore::internal {
namespace {

/// @param bytes the size of the vectors of all layouts so far; many layouts may refer to the same vectors.
Layout read_layout(const FlatBuffer& buffer, uint64_t table, const std::string& key, uint64_t& bytes) {
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(buffer.u8_field(table, 0));
  const FlatVector sizes = buffer.vector(table, 1, 4);
  const FlatVector order = buffer.vector(table, 2, 1);
  if (sizes.count != order.count || sizes.count > kMaxRank) {
    throw_format_error(
        "key '{}' has {} sizes and a dim_order of {}, at most 64 are possible", key, sizes.count, order.count);
  }
  bytes += 4ull * sizes.count + order.count;
  if (bytes > buffer.size()) {
    throw_format_error("the layouts together are longer than the flatbuffer");
  }
  for (uint32_t i = 0; i < sizes.count; ++i) {
    layout.sizes.push_back(static_cast<int32_t>(buffer.u32(sizes.start + 4ull * i)));
    layout.dim_order.push_back(buffer.u8(order.start + i));
  }
  if (const std::string problem = layout_problem(layout); !problem.empty()) {
    throw_format_error("key '{}': impossible tensor layout {}: {}", key, to_string(layout), problem);
  }
  return layout;
}

std::vector<PtdEntry> read_entries(const FlatBuffer& buffer, uint64_t root, const std::vector<PtdSegment>& segments) {
  const FlatVector vector = buffer.vector(root, 2, 4);
  std::vector<PtdEntry> entries;
  entries.reserve(vector.count);
  TextSet seen;
  seen.reserve(vector.count);
  uint64_t key_bytes = 0;
  std::unordered_map<uint64_t, Layout> layouts; // by position: keys may share one
  uint64_t layout_bytes = 0;
  for (uint32_t i = 0; i < vector.count; ++i) {
    const uint64_t table = buffer.element(vector, i);
    if (buffer.field(table, 0, 4) == 0) {
      throw_format_error("entry {} has no key", i);
    }
    const std::string_view key = buffer.string(table, 0);
    key_bytes += key.size();
    if (key_bytes > buffer.size()) {
      throw_format_error("the keys together are longer than the flatbuffer");
    }
    if (!is_utf8(key)) {
      throw_format_error("key '{}' is not valid UTF-8", key);
    }
    if (!seen.insert(key).second) {
      throw_format_error("key '{}' occurs twice", key);
    }
    PtdEntry entry;
    entry.key = key;
    entry.segment = buffer.u32_field(table, 1);
    if (entry.segment >= segments.size()) {
      throw_format_error("key '{}' is in segment {}, there are {}", key, entry.segment, segments.size());
    }
    if (const uint64_t at = buffer.object(table, 2); at != 0) {
      auto known = layouts.find(at);
      if (known == layouts.end()) {
        known = layouts.emplace(at, read_layout(buffer, at, entry.key, layout_bytes)).first;
      }
      entry.layout = known->second;
      const uint64_t nbytes = *layout_nbytes(*entry.layout);
      const uint64_t size = segments[entry.segment].size;
      if (nbytes != size) {
        throw_format_error(
            "key '{}' is {} of {} bytes, but its segment has {}", key, to_string(*entry.layout), nbytes, size);
      }
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

void check_alignment(const PtdTable& table) {
  for (const PtdEntry& entry : table.entries) {
    const uint64_t start = table.segments[entry.segment].start;
    if (entry.alignment == 0 || start % entry.alignment != 0) {
      throw_format_error("key '{}' asks for alignment {} but lies at byte {}", entry.key, entry.alignment, start);
    }
  }
}

/// The table of contents, without the manifest.
PtdTable read_contents(const FlatBuffer& buffer, const PtdBounds& bounds) {
  const uint64_t root = buffer.root();
  if (const uint32_t version = buffer.u32_field(root, 0); version != 0) {
    throw_format_error("expected schema version 0, found {}", version);
  }
  if (buffer.field(root, 1, 4) == 0 || buffer.field(root, 2, 4) == 0) {
    throw_format_error("the list of segments or of keys is missing");
  }
  PtdTable table;
  table.segment_base = bounds.segment_base;
  table.segment_end = bounds.segment_end();
  table.segments = read_segments(buffer, root, bounds);
  table.entries = read_entries(buffer, root, table.segments);
  return table;
}

PtdTable read_table(const uint8_t* data, uint64_t size) {
  const PtdBounds bounds = read_bounds(data, size);
  PtdTable table = read_contents(FlatBuffer(data, bounds.flatbuffer_end), bounds);
  table.manifest = find_manifest(data, size, bounds);
  if (!table.manifest) {
    return table;
  }
  const Digest head = read_manifest(table, *table.manifest, data);
  if (digest(data, bounds.segment_base) != head) {
    throw_manifest_error(format("the first {} bytes are damaged: their digest differs", bounds.segment_base));
  }
  check_alignment(table);
  return table;
}

/// The keys of its blobs, or its number.
std::string name_of_segment(const PtdTable& table, uint32_t at) {
  std::vector<std::string_view> keys;
  for (const PtdEntry& entry : table.entries) {
    if (entry.segment == at) {
      keys.push_back(entry.key);
    }
  }
  return keys.empty() ? format("segment {}", at) : in_quotes(keys);
}

} // namespace

PtdTable read_ptd(const std::string& path, const uint8_t* data, uint64_t size) {
  try {
    return read_table(data, size);
  } catch (const ManifestError& error) {
    throw_error_in(ErrorKind::Integrity, path, "{}", error.what());
  } catch (const FormatError& error) {
    throw_error_in(ErrorKind::InvalidFile, path, "{}", error.what());
  }
}

bool verify_ptd(const std::string& path, const uint8_t* data, const PtdTable& table) {
  if (!table.manifest) {
    return false;
  }
  const auto check_padding = [&](uint64_t start, uint64_t end) {
    if (start < end && std::any_of(data + start, data + end, [](uint8_t byte) { return byte != 0; })) {
      throw_error_in(ErrorKind::Integrity, path, "the padding before byte {} is not zero", end);
    }
  };
  uint64_t position = table.segment_base;
  for (const uint32_t at : order_in_file(table.segments)) {
    const PtdSegment& segment = table.segments[at];
    check_padding(position, segment.start);
    position = std::max(position, segment.start + segment.size);
    const Digest found = digest(data + segment.start, segment.size);
    if (found != segment.digest) {
      throw_error_in(
          ErrorKind::Integrity,
          path,
          "the bytes of {} are damaged: expected xxh3-128 {}, found {}",
          name_of_segment(table, at),
          to_string(segment.digest),
          to_string(found));
    }
  }
  check_padding(position, table.segment_end);
  return true;
}

} // namespace blobstore::internal
