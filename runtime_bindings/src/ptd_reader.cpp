#include "ptd_reader.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>
#include <unordered_map>

#include <blobstore/error.h>

#include "flatbuffer.h"
#include "text_hash.h"
#include "utf8.h"

namespace blobstore {
namespace {

constexpr size_t kFieldsStart = 8; // behind the root offset and the file identifier
constexpr size_t kFieldsSize = 40;
constexpr size_t kMark = kFieldsStart + kFieldsSize; // where a file with a manifest has the manifest's magic
constexpr char kManifestIdentifier[] = "BM01";
constexpr char kMagic[] = "BLOBMAN1";
constexpr char kOldMagic[] = "BLOBEND1"; // of a file whose manifest has a key
constexpr size_t kMagicSize = 8;
constexpr size_t kTail = 8 + kMagicSize; // the length of the manifest, and the magic
constexpr size_t kDigestSize = 16;

/// Why the digests of a file cannot be believed.
class ManifestError : public FormatError {
 public:
  using FormatError::FormatError;
};

struct Header {
  uint64_t flatbuffer_end;
  uint64_t segment_base;
  uint64_t segment_data_size;

  uint64_t segment_end() const { return segment_base + segment_data_size; }
};

uint64_t load_u64(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

std::string number(uint64_t value) {
  return std::to_string(value);
}

std::string quoted(std::string_view key) {
  return "'" + std::string(key) + "'";
}

Header read_header(const uint8_t* data, uint64_t size) {
  if (size < kFieldsStart + kFieldsSize) {
    throw FormatError(number(size) + " bytes are too few for a .ptd");
  }
  const std::string_view identifier(reinterpret_cast<const char*>(data) + 4, 4);
  if (identifier != "FT01") {
    throw FormatError("not a .ptd: expected the identifier 'FT01', found " + quoted(identifier));
  }
  const std::string_view magic(reinterpret_cast<const char*>(data) + kFieldsStart, 4);
  if (magic != "FH01") {
    throw FormatError("expected the header magic 'FH01', found " + quoted(magic));
  }
  uint32_t length;
  std::memcpy(&length, data + 12, sizeof length);
  if (length < kFieldsSize) {
    throw FormatError("header length " + number(length) + " is below 40");
  }
  const uint64_t offset = load_u64(data + 16);
  const uint64_t flatbuffer_size = load_u64(data + 24);
  const uint64_t base = load_u64(data + 32);
  const uint64_t data_size = load_u64(data + 40);
  if (offset < kFieldsStart + kFieldsSize || offset > base || flatbuffer_size > base - offset) {
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

std::vector<PtdSegment> read_segments(const FlatBuffer& buffer, uint64_t root, const Header& header) {
  const FlatVector vector = buffer.vector(root, 1, 4);
  std::vector<PtdSegment> segments(vector.count);
  for (uint32_t i = 0; i < vector.count; ++i) {
    const uint64_t table = buffer.element(vector, i);
    const uint64_t offset = buffer.u64_field(table, 0);
    const uint64_t size = buffer.u64_field(table, 1);
    if (offset > header.segment_data_size || size > header.segment_data_size - offset) {
      throw FormatError(
          "segment " + number(i) + " of " + number(size) + " bytes at " + number(offset) + " is not within the " +
          number(header.segment_data_size) + " bytes of segments");
    }
    segments[i].start = header.segment_base + offset;
    segments[i].size = size;
  }
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < segments.size(); ++i) {
    if (segments[i].size != 0) {
      order.push_back(i);
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return segments[a].start < segments[b].start;
  });
  for (size_t i = 1; i < order.size(); ++i) {
    const PtdSegment& left = segments[order[i - 1]];
    if (left.start + left.size > segments[order[i]].start) {
      throw FormatError("segments " + number(order[i - 1]) + " and " + number(order[i]) + " overlap");
    }
  }
  return segments;
}

/// @param bytes what the vectors of all layouts take so far; many layouts may refer to the same.
Layout read_layout(const FlatBuffer& buffer, uint64_t table, const std::string& key, uint64_t& bytes) {
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(buffer.u8_field(table, 0));
  const FlatVector sizes = buffer.vector(table, 1, 4);
  const FlatVector order = buffer.vector(table, 2, 1);
  if (sizes.count != order.count || sizes.count > kMaxRank) {
    throw FormatError(
        "key " + quoted(key) + " has " + number(sizes.count) + " sizes and a dim_order of " + number(order.count) +
        ", at most 64 are possible");
  }
  bytes += 4ull * sizes.count + order.count;
  if (bytes > buffer.size()) {
    throw FormatError("the layouts together are longer than the flatbuffer");
  }
  for (uint32_t i = 0; i < sizes.count; ++i) {
    layout.sizes.push_back(static_cast<int32_t>(buffer.u32(sizes.start + 4ull * i)));
    layout.dim_order.push_back(buffer.u8(order.start + i));
  }
  if (const std::string problem = layout_problem(layout); !problem.empty()) {
    throw FormatError("key " + quoted(key) + ": impossible tensor layout " + to_string(layout) + ": " + problem);
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
      throw FormatError("entry " + number(i) + " has no key");
    }
    const std::string_view key = buffer.string(table, 0);
    key_bytes += key.size();
    if (key_bytes > buffer.size()) {
      throw FormatError("the keys together are longer than the flatbuffer");
    }
    if (!is_utf8(key)) {
      throw FormatError("key " + quoted(key) + " is not valid UTF-8");
    }
    if (!seen.insert(key).second) {
      throw FormatError("key " + quoted(key) + " is there twice");
    }
    PtdEntry entry;
    entry.key = key;
    entry.segment = buffer.u32_field(table, 1);
    if (entry.segment >= segments.size()) {
      throw FormatError(
          "key " + quoted(key) + " is in segment " + number(entry.segment) + ", there are " + number(segments.size()));
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
        throw FormatError(
            "key " + quoted(key) + " is " + to_string(*entry.layout) + " of " + number(nbytes) +
            " bytes, but its segment has " + number(size));
      }
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

bool ends_with(const uint8_t* data, uint64_t size, const char* magic) {
  return size >= kMagicSize && std::memcmp(data + size - kMagicSize, magic, kMagicSize) == 0;
}

/// The manifest behind the last segment: where its flatbuffer is and how long; nothing if the file has none there.
std::optional<PtdManifest> find_manifest(const uint8_t* data, uint64_t size, const Header& header) {
  const uint64_t start = header.segment_end();
  const bool marked = size >= kMark + kMagicSize && std::memcmp(data + kMark, kMagic, kMagicSize) == 0;
  const bool ended = size - start >= kTail && ends_with(data, size, kMagic);
  if (!marked && !ended) {
    return std::nullopt;
  }
  if (!marked) {
    throw ManifestError("the file ends like one with a manifest, but the mark in its header is damaged");
  }
  if (!ended) {
    throw ManifestError("the file was cut, or is damaged at its end: the magic of its manifest is missing");
  }
  const uint64_t room = size - start - kTail;
  const uint64_t length = load_u64(data + size - kTail);
  if (room < kDigestSize || length != room - kDigestSize) {
    throw ManifestError(
        "a manifest of " + number(length) + " bytes does not fit between the segments, which end at byte " +
        number(start) + ", and the end of the file at " + number(size));
  }
  return PtdManifest{start, length};
}

/// The index of the key of the manifest in an earlier file, which had one.
std::optional<size_t> find_keyed_manifest(const PtdTable& table, const uint8_t* data, uint64_t size) {
  std::optional<size_t> found;
  const size_t last = table.segments.size() - 1;
  bool alone = true;
  for (size_t i = 0; i < table.entries.size(); ++i) {
    const PtdEntry& entry = table.entries[i];
    const PtdSegment& segment = table.segments[entry.segment];
    const bool is_manifest = entry.key.rfind(kRecordPrefix, 0) == 0 && segment.size >= 8 &&
        std::memcmp(data + segment.start + 4, kManifestIdentifier, 4) == 0;
    alone = alone && is_manifest == (entry.segment == last) && !(is_manifest && found);
    if (is_manifest) {
      found = i;
    }
  }
  if (!found) {
    if (ends_with(data, size, kOldMagic)) {
      throw ManifestError("the file ends like one with a manifest, but its key is damaged");
    }
    return std::nullopt;
  }
  if (!alone) {
    throw ManifestError("a manifest that has a key must be alone in the last segment");
  }
  const PtdSegment& segment = table.segments[last];
  if (segment.start + segment.size != size || !ends_with(data, size, kOldMagic) ||
      segment.size < kDigestSize + kMagicSize) {
    throw ManifestError(
        "the manifest ends at byte " + number(segment.start + segment.size) + " of " + number(size) +
        ", or its magic is missing");
  }
  return found;
}

void check_metadata(const FlatBuffer& buffer, uint64_t root) {
  const FlatVector pairs = buffer.vector(root, 4, 4);
  uint64_t bytes = 0;
  std::optional<std::string_view> before;
  for (uint32_t i = 0; i < pairs.count; ++i) {
    const uint64_t pair = buffer.element(pairs, i);
    const std::string_view key = buffer.string(pair, 0);
    const std::string_view value = buffer.string(pair, 1);
    bytes += key.size() + value.size();
    if (bytes > buffer.size()) { // many may refer to one
      throw FormatError("the texts of the metadata together are longer than the manifest");
    }
    if (!is_utf8(key) || !is_utf8(value)) {
      throw FormatError("metadata is not valid UTF-8");
    }
    if (before && *before >= key) {
      throw FormatError("the keys of the metadata do not ascend");
    }
    before = key;
  }
}

/// Check the manifest and take over what it says of the file's segments and keys.
///
/// @param manifest where it is; `digests` is found here.
/// @returns the digest of the head.
Digest read_manifest(PtdTable& table, PtdManifest& manifest, const uint8_t* data) {
  const uint8_t* body = data + manifest.start;
  if (std::memcmp(digest(body, manifest.size).data(), body + manifest.size, kDigestSize) != 0) {
    throw ManifestError("the manifest is damaged: its digest differs");
  }
  if (manifest.size < 8 || std::memcmp(body + 4, kManifestIdentifier, 4) != 0) {
    throw ManifestError("the manifest is malformed: its identifier is missing");
  }
  try {
    const FlatBuffer buffer(body, manifest.size);
    const uint64_t root = buffer.root();
    if (const uint32_t version = buffer.u32_field(root, 0); version > 0) {
      throw FormatError("it has version " + number(version) + ", this blobstore reads up to 0");
    }
    const uint64_t head_at = buffer.field(root, 1, kDigestSize);
    if (head_at == 0) {
      throw FormatError("it lacks the digest of the head");
    }
    const FlatVector digests = buffer.vector(root, 2, kDigestSize);
    const FlatVector alignments = buffer.vector(root, 3, 4);
    if (digests.count != table.segments.size() || alignments.count != table.entries.size()) {
      throw FormatError(
          "it tells of " + number(digests.count) + " segments and " + number(alignments.count) +
          " keys, the file has " + number(table.segments.size()) + " and " + number(table.entries.size()));
    }
    check_metadata(buffer, root);
    for (uint32_t i = 0; i < alignments.count; ++i) {
      table.entries[i].alignment = buffer.u32(alignments.start + 4ull * i);
    }
    for (uint32_t i = 0; i < digests.count; ++i) {
      std::memcpy(table.segments[i].digest.data(), body + digests.start + kDigestSize * i, kDigestSize);
    }
    manifest.digests = manifest.start + digests.start;
    Digest head;
    std::memcpy(head.data(), body + head_at, kDigestSize);
    return head;
  } catch (const FormatError& error) {
    throw ManifestError(std::string("the manifest is malformed: ") + error.what());
  }
}

void check_alignment(const PtdTable& table) {
  for (const PtdEntry& entry : table.entries) {
    const uint64_t start = table.segments[entry.segment].start;
    if (entry.alignment == 0 || start % entry.alignment != 0) {
      throw FormatError(
          "key " + quoted(entry.key) + " asks for alignment " + number(entry.alignment) + " but lies at byte " +
          number(start));
    }
  }
}

PtdTable read(const uint8_t* data, uint64_t size) {
  const Header header = read_header(data, size);
  const FlatBuffer buffer(data, header.flatbuffer_end);
  const uint64_t root = buffer.root();
  if (const uint32_t version = buffer.u32_field(root, 0); version != 0) {
    throw FormatError("expected schema version 0, found " + number(version));
  }
  if (buffer.field(root, 1, 4) == 0 || buffer.field(root, 2, 4) == 0) {
    throw FormatError("the list of segments or of keys is missing");
  }
  PtdTable table;
  table.segment_base = header.segment_base;
  table.segment_end = header.segment_end();
  table.segments = read_segments(buffer, root, header);
  table.entries = read_entries(buffer, root, table.segments);
  std::optional<size_t> keyed;
  table.manifest = find_manifest(data, size, header);
  if (!table.manifest) {
    keyed = find_keyed_manifest(table, data, size);
    if (keyed) {
      const PtdSegment& segment = table.segments.back();
      table.manifest = PtdManifest{segment.start, segment.size - kDigestSize - kMagicSize};
    }
  }
  if (!table.manifest) {
    return table;
  }
  const Digest head = read_manifest(table, *table.manifest, data);
  if (digest(data, header.segment_base) != head) {
    throw ManifestError("the first " + number(header.segment_base) + " bytes are damaged: their digest differs");
  }
  if (keyed) { // from here on it is as in other files: neither a key nor a segment
    table.entries.erase(table.entries.begin() + static_cast<std::ptrdiff_t>(*keyed));
    table.segments.pop_back();
    table.segment_end = table.manifest->start;
  }
  check_alignment(table);
  return table;
}

} // namespace

PtdTable read_ptd(const std::string& path, const uint8_t* data, uint64_t size) {
  try {
    return read(data, size);
  } catch (const ManifestError& error) {
    throw Error(ErrorKind::Integrity, path, error.what());
  } catch (const FormatError& error) {
    throw Error(ErrorKind::InvalidFile, path, error.what());
  }
}

bool verify_ptd(const std::string& path, const uint8_t* data, const PtdTable& table) {
  if (!table.manifest) {
    return false;
  }
  std::vector<uint32_t> order(table.segments.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return table.segments[a].start < table.segments[b].start;
  });
  const auto check_padding = [&](uint64_t start, uint64_t end) {
    if (start < end && std::any_of(data + start, data + end, [](uint8_t byte) { return byte != 0; })) {
      throw Error(ErrorKind::Integrity, path, "the padding before byte " + number(end) + " is not zero");
    }
  };
  uint64_t position = table.segment_base;
  for (const uint32_t at : order) {
    const PtdSegment& segment = table.segments[at];
    check_padding(position, segment.start);
    position = std::max(position, segment.start + segment.size);
    const Digest found = digest(data + segment.start, segment.size);
    if (found != segment.digest) {
      std::string keys;
      for (const PtdEntry& entry : table.entries) {
        if (entry.segment == at) {
          keys += (keys.empty() ? "" : ", ") + quoted(entry.key);
        }
      }
      throw Error(
          ErrorKind::Integrity,
          path,
          "the bytes of " + (keys.empty() ? "segment " + number(at) : keys) + " are damaged: expected xxh3-128 " +
              to_string(segment.digest) + ", found " + to_string(found));
    }
  }
  check_padding(position, table.segment_end);
  return true;
}

} // namespace blobstore
