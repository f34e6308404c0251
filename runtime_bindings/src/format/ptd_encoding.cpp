// Every table in these flatbuffers has one of six shapes, so their positions can be computed, and they are written
// front to back. Format: https://flatbuffers.dev/internals/
#include "format/ptd_encoding.h"

#include <cstring>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>

#include <blobstore/error.h>

#include "format/constants.h"
#include "os/file.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr size_t kStart = 8; // behind the root offset and the file identifier
constexpr size_t kInserted = 48; // the header and the mark
constexpr std::string_view kMagic = kManifestMagic;
constexpr size_t kVtableRoom = 12;
constexpr size_t kSegmentTable = 24;
constexpr size_t kKeyTable = 16;

// The vtables: own size, size of the table, and the position of each field, 0 if it is absent.
constexpr uint16_t kVtables[][kVtableRoom / 2] = {
    {10, 16, 4, 8, 12}, // FlatTensor: version, segments, named_data
    {8, 24, 8, 16}, // DataSegment: offset, size
    {10, 16, 4, 8, 12}, // NamedData of a tensor: key, segment_index, tensor_layout
    {10, 12, 4, 8, 0}, // NamedData without a layout
    {10, 16, 12, 4, 8}, // TensorLayout: scalar_type, sizes, dim_order
};
enum Shape { kFlatTensor, kSegment, kTensor, kWithoutLayout, kLayout };

constexpr size_t vtable(Shape shape) {
  return kStart + kInserted + kVtableRoom * shape;
}

class Bytes {
 public:
  explicit Bytes(size_t size) : bytes_(size) {}

  template <typename Number>
  void put(size_t at, Number value) {
    std::memcpy(bytes_.data() + at, &value, sizeof value);
  }
  void u32(size_t at, uint64_t value) { put(at, static_cast<uint32_t>(value)); }
  /// An offset at a position that leads to a target.
  void reference(size_t at, size_t target) { u32(at, target - at); }
  /// The first field of a table.
  void table(size_t at, Shape shape) { u32(at, at - vtable(shape)); }
  void copy(size_t at, const void* data, size_t size) {
    if (size != 0) {
      std::memcpy(bytes_.data() + at, data, size);
    }
  }
  void text(size_t at, std::string_view text) { copy(at, text.data(), text.size()); }
  const uint8_t* data() const { return bytes_.data(); }
  std::vector<uint8_t> take() { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
};

size_t layout_size(size_t rank) {
  return align_up(16 + 4 + 4 * rank + 4 + rank, 4);
}

void put_layout(Bytes& out, size_t at, const Layout& layout) {
  const size_t rank = layout.sizes.size();
  const size_t sizes = at + 16;
  const size_t order = sizes + 4 + 4 * rank;
  out.table(at, kLayout);
  out.reference(at + 4, sizes);
  out.reference(at + 8, order);
  out.put(at + 12, layout.scalar_type);
  out.u32(sizes, rank);
  out.u32(order, rank);
  for (size_t i = 0; i < rank; ++i) {
    out.put(sizes + 4 + 4 * i, layout.sizes[i]);
    out.put(order + 4 + i, layout.dim_order[i]);
  }
}

/// Equal layouts have equal texts.
std::string text_of(const Layout& layout) {
  std::string text(1, static_cast<char>(layout.scalar_type));
  text.append(reinterpret_cast<const char*>(layout.sizes.data()), 4 * layout.sizes.size());
  return text.append(layout.dim_order.begin(), layout.dim_order.end());
}

/// Length, text, and at least one NUL up to a multiple of four.
size_t string_size(std::string_view text) {
  return 4 + align_up(text.size() + 1, 4);
}

} // namespace

std::vector<uint8_t> encode_table(const std::vector<TableKey>& keys, const std::vector<TableSegment>& segments) {
  const size_t root = align_up(kStart + kInserted + kVtableRoom * std::size(kVtables), 8);
  const size_t segment_vector = root + 16;
  const size_t segment_tables = align_up(segment_vector + 4 + 4 * segments.size(), 8);
  const size_t key_vector = segment_tables + kSegmentTable * segments.size();
  const size_t key_tables = key_vector + 4 + 4 * keys.size();
  uint64_t end = key_tables + kKeyTable * keys.size();

  std::unordered_map<std::string, size_t> known; // equal layouts share a table
  std::vector<size_t> layouts(keys.size(), 0);
  std::vector<size_t> first; // the keys whose layouts are new
  for (size_t i = 0; i < keys.size(); ++i) {
    if (const std::optional<Layout>& layout = *keys[i].layout) {
      const auto [at, is_new] = known.emplace(text_of(*layout), end);
      layouts[i] = at->second;
      if (is_new) {
        first.push_back(i);
        end += layout_size(layout->sizes.size());
      }
    }
  }
  const size_t strings = end;
  for (const TableKey& key : keys) {
    end += string_size(key.key);
  }
  if (end > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
    throw_error(ErrorKind::Unsupported, "keys and layouts would take {} bytes; a .ptd has room for 2 GiB", end);
  }

  Bytes out(end);
  out.u32(0, root);
  out.text(4, "FT01");
  for (size_t i = 0; i < std::size(kVtables); ++i) {
    for (size_t j = 0; j < kVtableRoom / 2; ++j) {
      out.put(vtable(static_cast<Shape>(i)) + 2 * j, kVtables[i][j]);
    }
  }
  out.table(root, kFlatTensor);
  out.reference(root + 8, segment_vector);
  out.reference(root + 12, key_vector);
  out.u32(segment_vector, segments.size());
  for (size_t i = 0; i < segments.size(); ++i) {
    const size_t at = segment_tables + kSegmentTable * i;
    out.reference(segment_vector + 4 + 4 * i, at);
    out.table(at, kSegment);
    out.put(at + 8, segments[i].offset);
    out.put(at + 16, segments[i].size);
  }
  out.u32(key_vector, keys.size());
  size_t string = strings;
  for (size_t i = 0; i < keys.size(); ++i) {
    const size_t at = key_tables + kKeyTable * i;
    out.reference(key_vector + 4 + 4 * i, at);
    out.table(at, layouts[i] != 0 ? kTensor : kWithoutLayout);
    out.reference(at + 4, string);
    out.u32(at + 8, keys[i].segment);
    if (layouts[i] != 0) {
      out.reference(at + 12, layouts[i]);
    }
    out.u32(string, keys[i].key.size());
    out.text(string + 4, keys[i].key);
    string += string_size(keys[i].key);
  }
  for (const size_t i : first) {
    put_layout(out, layouts[i], **keys[i].layout);
  }
  return out.take();
}

void encode_header(std::vector<uint8_t>& table, uint64_t segment_base, uint64_t segment_data_size) {
  const std::string_view magic = "FH01";
  const uint32_t length = 40;
  const uint64_t numbers[] = {kInserted, table.size() - kInserted, segment_base, segment_data_size};
  uint8_t* at = table.data() + kStart;
  std::memcpy(at, magic.data(), magic.size());
  std::memcpy(at + 4, &length, sizeof length);
  std::memcpy(at + 8, numbers, sizeof numbers);
  std::memcpy(at + length, kMagic.data(), kMagic.size());
}

std::vector<uint8_t> encode_manifest(
    const Digest& head,
    const std::vector<Digest>& digests,
    const std::vector<uint32_t>& alignments,
    const std::map<std::string, std::string>& metadata,
    const std::vector<uint32_t>& opaque) {
  // own size, size of the table, and the positions of version, head, segments, alignments, metadata, opaque
  constexpr uint16_t kWithOpaque[] = {16, 40, 36, 20, 16, 12, 8, 4};
  constexpr uint16_t kWithout[] = {14, 36, 32, 16, 12, 8, 4};
  const uint16_t* fields = opaque.empty() ? kWithout : kWithOpaque;
  constexpr size_t kTable = 24; // behind the root offset, the identifier, and the vtable, which ends there
  const size_t segments_at = kTable + fields[1];
  const size_t alignments_at = segments_at + 4 + sizeof(Digest) * digests.size();
  const size_t opaque_at = alignments_at + 4 + 4 * alignments.size();
  const size_t metadata_at = opaque_at + (opaque.empty() ? 0 : 4 + 4 * opaque.size());
  // behind the vector of references, as Python's builder writes them: from the last pair to the first, each with its
  // two strings, and before the first pair the vtable of all
  constexpr uint16_t kPairVtable[] = {8, 12, 8, 4};
  size_t size = metadata_at + 4 + 4 * metadata.size() + (metadata.empty() ? 0 : sizeof kPairVtable);
  for (const auto& [key, value] : metadata) {
    size += kPairVtable[1] + string_size(key) + string_size(value);
  }

  Bytes out(size + sizeof(Digest) + 8 + kMagic.size());
  out.u32(0, kTable);
  out.text(4, kManifestIdentifier);
  out.copy(kTable - fields[0], fields, fields[0]);
  out.u32(kTable, fields[0]);
  if (!opaque.empty()) {
    out.reference(kTable + kWithOpaque[7], opaque_at);
    out.u32(opaque_at, opaque.size());
    out.copy(opaque_at + 4, opaque.data(), 4 * opaque.size());
  }
  out.reference(kTable + fields[6], metadata_at);
  out.reference(kTable + fields[5], alignments_at);
  out.reference(kTable + fields[4], segments_at);
  out.copy(kTable + fields[3], head.data(), head.size());
  out.u32(segments_at, digests.size());
  out.copy(segments_at + 4, digests.data(), sizeof(Digest) * digests.size());
  out.u32(alignments_at, alignments.size());
  out.copy(alignments_at + 4, alignments.data(), 4 * alignments.size());
  out.u32(metadata_at, metadata.size());
  size_t end = size; // from the end, where the first pair lies
  size_t vtable = 0;
  size_t reference = metadata_at + 4;
  for (const auto& [key, value] : metadata) {
    const size_t key_at = end - string_size(key);
    const size_t value_at = key_at - string_size(value);
    const size_t pair = value_at - kPairVtable[1];
    end = pair;
    if (vtable == 0) {
      end = vtable = pair - sizeof kPairVtable;
      out.copy(vtable, kPairVtable, sizeof kPairVtable);
    }
    out.reference(reference, pair);
    out.u32(pair, static_cast<uint32_t>(pair - vtable)); // below zero if the vtable lies behind it
    out.reference(pair + kPairVtable[3], value_at);
    out.reference(pair + kPairVtable[2], key_at);
    for (const auto& [at, text] : {std::pair(value_at, &value), std::pair(key_at, &key)}) {
      out.u32(at, text->size());
      out.text(at + 4, *text);
    }
    reference += 4;
  }
  const Digest sum = digest(out.data(), size);
  out.copy(size, sum.data(), sum.size());
  out.put(size + sizeof(Digest), static_cast<uint64_t>(size));
  out.text(size + sizeof(Digest) + 8, kMagic);
  return out.take();
}

} // namespace blobstore::internal
