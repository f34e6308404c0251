#include "format/ptd_manifest.h"

#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <string_view>

#include "format/constants.h"
#include "format/utf8.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr size_t kMark = kPtdFieldsStart + kPtdFieldsSize; // where a file with a manifest repeats its magic
constexpr size_t kMagicSize = 8;
constexpr size_t kTail = 8 + kMagicSize; // the length of the manifest, and the magic
constexpr size_t kDigestSize = 16;

bool ends_with(const uint8_t* data, uint64_t size, const char* magic) {
  return size >= kMagicSize && std::memcmp(data + size - kMagicSize, magic, kMagicSize) == 0;
}

std::map<std::string, std::string> read_metadata(const FlatBuffer& buffer, uint64_t root) {
  std::map<std::string, std::string> metadata;
  const FlatVector pairs = buffer.vector(root, 4, 4);
  uint64_t bytes = 0;
  std::optional<std::string_view> before;
  for (uint32_t i = 0; i < pairs.count; ++i) {
    const uint64_t pair = buffer.element(pairs, i);
    const std::string_view key = buffer.string(pair, 0);
    const std::string_view value = buffer.string(pair, 1);
    bytes += key.size() + value.size();
    if (bytes > buffer.size()) { // many may refer to one
      throw_format_error("the texts of the metadata together are longer than the manifest");
    }
    if (!is_utf8(key) || !is_utf8(value)) {
      throw_format_error("metadata is not valid UTF-8");
    }
    if (before && *before >= key) {
      throw_format_error("the keys of the metadata do not ascend");
    }
    before = key;
    metadata.emplace_hint(metadata.end(), key, value);
  }
  return metadata;
}

void hide_stand_ins(PtdTable& table, const FlatBuffer& buffer, uint64_t root) {
  const FlatVector opaque = buffer.vector(root, 5, 4);
  int64_t before = -1;
  for (uint32_t i = 0; i < opaque.count; ++i) {
    const uint32_t at = buffer.u32(opaque.start + 4ull * i);
    if (at >= table.entries.size()) {
      throw_format_error("it lists key {} as opaque, there are {}", at, table.entries.size());
    }
    if (at <= before) {
      throw_format_error("the opaque keys do not ascend");
    }
    PtdEntry& entry = table.entries[at];
    const uint64_t size = table.segments[entry.segment].size;
    if (!entry.layout || entry.layout != stand_in(size)) {
      throw_format_error(
          "it lists '{}' as opaque: expected the layout byte[{}], found {}",
          entry.key,
          size,
          entry.layout ? to_string(*entry.layout) : "none");
    }
    entry.layout.reset();
    before = at;
  }
}

} // namespace

void throw_manifest_error(const std::string& reason) {
  throw ManifestError(reason);
}

std::optional<Layout> stand_in(uint64_t size) {
  constexpr int8_t kByte = 0;
  if (size > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
    return std::nullopt;
  }
  return Layout{kByte, {static_cast<int32_t>(size)}, {0}};
}

std::optional<PtdManifest> find_manifest(const uint8_t* data, uint64_t size, const PtdBounds& bounds) {
  const uint64_t start = bounds.segment_end();
  const bool marked = size >= kMark + kMagicSize && std::memcmp(data + kMark, kManifestMagic, kMagicSize) == 0;
  const bool ended = size - start >= kTail && ends_with(data, size, kManifestMagic);
  if (!marked && !ended) {
    return std::nullopt;
  }
  if (!marked) {
    throw_manifest_error("the file ends like one with a manifest, but the mark in its header is damaged");
  }
  if (!ended) {
    throw_manifest_error("the file was cut, or is damaged at its end: the magic of its manifest is missing");
  }
  const uint64_t room = size - start - kTail;
  const uint64_t length = load_u64(data + size - kTail);
  if (room < kDigestSize || length != room - kDigestSize) {
    throw_manifest_error(format(
        "a manifest of {} bytes does not fit between the segments, which end at byte {}, and the end of the file at {}",
        length,
        start,
        size));
  }
  return PtdManifest{start, length};
}

std::string metadata_unverified(const uint8_t* data, uint64_t size, const std::string& key) {
  if (size < kTail + kDigestSize || !ends_with(data, size, kManifestMagic)) {
    return std::string();
  }
  const uint64_t length = load_u64(data + size - kTail);
  if (length > size - kTail - kDigestSize) {
    return std::string();
  }
  try {
    const FlatBuffer buffer(data + size - kTail - kDigestSize - length, length);
    const auto metadata = read_metadata(buffer, buffer.root());
    const auto text = metadata.find(key);
    return text == metadata.end() ? std::string() : text->second;
  } catch (const FormatError&) {
    return std::string();
  }
}

Digest read_manifest(PtdTable& table, PtdManifest& manifest, const uint8_t* data) {
  const uint8_t* body = data + manifest.start;
  if (std::memcmp(digest(body, manifest.size).data(), body + manifest.size, kDigestSize) != 0) {
    throw_manifest_error("the manifest is damaged: its digest differs");
  }
  if (manifest.size < 8 || std::memcmp(body + 4, kManifestIdentifier, 4) != 0) {
    throw_manifest_error("the manifest is malformed: its identifier is missing");
  }
  try {
    const FlatBuffer buffer(body, manifest.size);
    const uint64_t root = buffer.root();
    if (const uint32_t version = buffer.u32_field(root, 0); version > 0) {
      throw_format_error("it has version {}, this blobstore reads up to 0", version);
    }
    const uint64_t head_at = buffer.field(root, 1, kDigestSize);
    if (head_at == 0) {
      throw_format_error("it lacks the digest of the head");
    }
    const FlatVector digests = buffer.vector(root, 2, kDigestSize);
    const FlatVector alignments = buffer.vector(root, 3, 4);
    if (digests.count != table.segments.size() || alignments.count != table.entries.size()) {
      throw_format_error(
          "it has {} segments and {} keys, the file has {} and {}",
          digests.count,
          alignments.count,
          table.segments.size(),
          table.entries.size());
    }
    table.metadata = read_metadata(buffer, root);
    hide_stand_ins(table, buffer, root);
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
    throw_manifest_error(format("the manifest is malformed: {}", error.what()));
  }
}

} // namespace blobstore::internal
