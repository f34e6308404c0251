#include "packed/packed_file.h"

#include <cstring>
#include <optional>
#include <utility>

#include <blobstore/error.h>

#include "os/output_file.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

// ExecuTorch's footer: the start of the index, the number of entries, magic, version; see XNNWeightsCache.h
constexpr size_t kFooter = 20;
constexpr uint32_t kMagic = 0x58505743;
constexpr uint32_t kVersion = 2;
constexpr size_t kEntry = 4 + 8 + 8 + 4; // an entry of the index, without its name

// ours, between the index and the footer: the start and the size of the digests, the digest of all but the blobs, magic
constexpr size_t kTrailer = 8 + 8 + sizeof(Digest) + 8;
constexpr size_t kAboutEntry = sizeof(Digest) + 4; // the digest of an entry, and the number of its map
constexpr char kTrailerMagic[] = "BSPACK01";

class Encoder {
 public:
  template <typename Number>
  void number(Number value) {
    for (size_t i = 0; i < sizeof value; ++i) {
      bytes.push_back(static_cast<uint8_t>(value >> 8 * i));
    }
  }
  void text(const void* data, size_t size) {
    const auto* from = static_cast<const uint8_t*>(data);
    bytes.insert(bytes.end(), from, from + size);
  }
  std::vector<uint8_t> bytes;
};

/// Reads numbers one after the other. The caller checks the bounds.
class Decoder {
 public:
  Decoder(const uint8_t* data, uint64_t at) : data_(data), at_(at) {}
  template <typename Number>
  Number number() {
    Number value = 0;
    for (size_t i = 0; i < sizeof value; ++i) {
      value |= static_cast<Number>(data_[at_ + i]) << 8 * i;
    }
    at_ += sizeof value;
    return value;
  }
  Digest digest() {
    Digest out;
    std::memcpy(out.data(), data_ + at_, out.size());
    at_ += out.size();
    return out;
  }
  std::string text(size_t size) {
    std::string out(reinterpret_cast<const char*>(data_ + at_), size);
    at_ += size;
    return out;
  }
  uint64_t at() const { return at_; }

 private:
  const uint8_t* data_;
  uint64_t at_;
};

[[noreturn]] void invalid(const std::string& path, const std::string& reason) {
  throw_error_in(ErrorKind::InvalidFile, path, "not a file of packed weights: {}", reason);
}

struct Index {
  uint64_t start = 0;
  uint64_t end = 0; // of the last entry
  std::vector<PackedEntry> entries;
};

Index read_index(const std::string& path, const uint8_t* data, size_t size) {
  if (size < kFooter) {
    invalid(path, format("it has {} bytes", size));
  }
  Decoder footer(data, size - kFooter);
  Index index;
  index.start = footer.number<uint64_t>();
  const auto count = footer.number<uint32_t>();
  const auto magic = footer.number<uint32_t>();
  const auto version = footer.number<uint32_t>();
  if (magic != kMagic || version != kVersion) {
    invalid(path, "it does not end as such a file does");
  }
  const uint64_t limit = size - kFooter;
  if (index.start > limit || count > (limit - index.start) / kEntry) {
    invalid(path, format("its index of {} entries does not fit", count));
  }
  Decoder decoder(data, index.start);
  index.entries.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    if (limit - decoder.at() < kEntry) {
      invalid(path, format("entry {} of its index does not fit", i));
    }
    const auto length = decoder.number<uint32_t>();
    if (length > limit - decoder.at() || limit - decoder.at() - length < kEntry - 4) {
      invalid(path, format("entry {} of its index does not fit", i));
    }
    PackedEntry& entry = index.entries.emplace_back();
    entry.name = decoder.text(length);
    entry.offset = decoder.number<uint64_t>();
    entry.size = decoder.number<uint64_t>();
    entry.seed = decoder.number<uint32_t>();
    if (entry.offset > index.start || entry.size > index.start - entry.offset) {
      invalid(path, format("entry '{}' lies outside of the file", entry.name));
    }
  }
  index.end = decoder.at();
  return index;
}

/// Where each part of a file begins.
struct Plan {
  std::vector<uint64_t> offsets; // of the entries
  uint64_t digests = 0;
  uint64_t index = 0;
  uint64_t trailer = 0;
  uint64_t size = 0;
};

Plan plan(const PackedContents& contents) {
  Plan plan;
  uint64_t at = 0;
  uint64_t index = 0;
  for (const PackedBytes& one : contents.entries) {
    at = align_up(at, page_size()); // so that a write to one entry touches no page of another
    plan.offsets.push_back(at);
    at += one.entry.size;
    index += kEntry + one.entry.name.size();
  }
  plan.digests = at;
  plan.index = plan.digests + contents.entries.size() * kAboutEntry + 8 + contents.covers.size() * sizeof(Digest) + 8;
  for (const std::string& map : contents.maps) {
    plan.index += 8 + map.size();
  }
  plan.trailer = plan.index + index;
  plan.size = plan.trailer + kTrailer + kFooter;
  return plan;
}

} // namespace

PackedIndex::PackedIndex(const std::vector<PackedEntry>& entries) {
  for (const PackedEntry& entry : entries) {
    by_name_.emplace(entry.name, &entry);
  }
}

const PackedEntry* PackedIndex::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

PackedTable read_stock_table(const std::string& path, const uint8_t* data, size_t size) {
  return {read_index(path, data, size).entries, {}, {}};
}

PackedTable read_packed_table(const std::string& path, const uint8_t* data, size_t size) {
  Index index = read_index(path, data, size);
  if (size - kFooter - index.end != kTrailer) {
    invalid(path, "it has no digests");
  }
  Decoder trailer(data, index.end);
  const auto start = trailer.number<uint64_t>();
  const auto length = trailer.number<uint64_t>();
  const Digest expected = trailer.digest();
  if (std::memcmp(data + trailer.at(), kTrailerMagic, 8) != 0) {
    invalid(path, "it has no digests");
  }
  const uint64_t of_entries = index.entries.size() * kAboutEntry;
  if (start > index.start || length != index.start - start || length < of_entries + 16) {
    invalid(path, "its digests do not fit");
  }
  const Digest found = digest(data + start, index.end - start);
  if (found != expected) {
    throw_error_in(
        ErrorKind::Integrity,
        path,
        "its table has the digest {}, {} was recorded",
        to_string(found),
        to_string(expected));
  }
  Decoder decoder(data, start);
  PackedTable table{std::move(index.entries), {}, {}};
  for (PackedEntry& entry : table.entries) {
    if (entry.size > start || entry.offset > start - entry.size) {
      invalid(path, format("entry '{}' lies outside of the file", entry.name));
    }
    entry.digest = decoder.digest();
    entry.map = decoder.number<uint32_t>();
  }
  const auto left = [&] { return index.start - decoder.at(); };
  const auto covered = decoder.number<uint64_t>();
  if (left() < 8 || covered > (left() - 8) / sizeof(Digest)) {
    invalid(path, "its digests do not fit");
  }
  for (uint64_t i = 0; i < covered; ++i) {
    table.covers.insert(decoder.digest());
  }
  const auto maps = decoder.number<uint64_t>();
  for (uint64_t i = 0; i < maps; ++i) {
    const uint64_t size_of_map = left() < 8 ? UINT64_MAX : decoder.number<uint64_t>();
    if (size_of_map > left()) {
      invalid(path, "its maps do not fit");
    }
    std::optional<PackedMap> map = PackedMap::decode(data + decoder.at(), size_of_map);
    if (!map) {
      invalid(path, "one of its maps is not valid");
    }
    table.maps.push_back(std::move(*map));
    decoder.text(size_of_map);
  }
  for (const PackedEntry& entry : table.entries) {
    if (entry.map > table.maps.size()) {
      invalid(path, format("entry '{}' has a map that is not there", entry.name));
    }
  }
  return table;
}

uint64_t verify_packed(const std::string& path, const uint8_t* data, const PackedTable& table) {
  uint64_t compared = 0;
  const bool changes = PackedIndex(table.entries).find(kPackedState) != nullptr;
  for (const PackedEntry& entry : table.entries) {
    if (changes && entry.name != kPackedKeys) {
      continue;
    }
    compared += entry.size;
    const Digest found = digest(data + entry.offset, entry.size);
    if (found != entry.digest) {
      throw_error_in(
          ErrorKind::Integrity,
          path,
          "entry '{}' has the digest {}, {} was recorded",
          entry.name,
          to_string(found),
          to_string(entry.digest));
    }
  }
  return compared;
}

uint64_t packed_size(const PackedContents& contents) {
  return plan(contents).size;
}

void write_packed(const std::string& path, const PackedContents& contents) {
  const std::vector<PackedBytes>& entries = contents.entries;
  const Plan places = plan(contents);
  OutputFile out(path);
  const std::vector<uint8_t> zeros(page_size());
  Encoder table;
  uint64_t at = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    out.write(zeros.data(), places.offsets[i] - at);
    // before it is written: what the processor has in its maps is written in large pieces, and the system then keeps
    // the file in large pieces, which it maps with a fraction of the page faults
    const Digest of_entry = digest(entries[i].data, entries[i].entry.size);
    out.write(entries[i].data, entries[i].entry.size);
    at = places.offsets[i] + entries[i].entry.size;
    table.text(of_entry.data(), of_entry.size());
    table.number(entries[i].entry.map);
  }
  table.number(static_cast<uint64_t>(contents.covers.size()));
  for (const Digest& one : contents.covers) {
    table.text(one.data(), one.size());
  }
  table.number(static_cast<uint64_t>(contents.maps.size()));
  for (const std::string& map : contents.maps) {
    table.number(static_cast<uint64_t>(map.size()));
    table.text(map.data(), map.size());
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const PackedEntry& entry = entries[i].entry;
    table.number(static_cast<uint32_t>(entry.name.size()));
    table.text(entry.name.data(), entry.name.size());
    table.number(places.offsets[i]);
    table.number(entry.size);
    table.number(entry.seed);
  }
  const Digest of_table = digest(table.bytes.data(), table.bytes.size());
  table.number(places.digests);
  table.number(places.index - places.digests);
  table.text(of_table.data(), of_table.size());
  table.text(kTrailerMagic, 8);
  table.number(places.index);
  table.number(static_cast<uint32_t>(entries.size()));
  table.number(kMagic);
  table.number(kVersion);
  out.write(table.bytes.data(), table.bytes.size());
  out.make_read_only();
  out.commit();
}

} // namespace blobstore::internal
