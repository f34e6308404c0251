#include "packed/packed_file.h"

#include <cstring>
#include <optional>
#include <utility>

#include <blobstore/error.h>

#include "os/fence.h"
#include "os/output_file.h"
#include "os/text.h"
#include "packed/coding.h"
#include "packed/packed_keys.h"

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

struct TableIndex {
  uint64_t start = 0;
  uint64_t end = 0; // of the last entry
  std::vector<PackedEntry> entries;
};

TableIndex read_index(const std::string& path, const uint8_t* data, size_t size) {
  if (size < kFooter) {
    throw_not_packed(path, format("it has {} bytes", size));
  }
  Decoder footer(data, size - kFooter, size);
  TableIndex index;
  index.start = footer.value<uint64_t>();
  const auto count = footer.value<uint32_t>();
  const auto magic = footer.value<uint32_t>();
  const auto version = footer.value<uint32_t>();
  if (magic != kMagic || version != kVersion) {
    throw_not_packed(path, "it does not end as such a file does");
  }
  const uint64_t limit = size - kFooter;
  if (index.start > limit || count > (limit - index.start) / kEntry) {
    throw_not_packed(path, format("its index of {} entries does not fit", count));
  }
  Decoder decoder(data, index.start, limit);
  index.entries.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    PackedEntry& entry = index.entries.emplace_back();
    entry.name = decoder.text(decoder.value<uint32_t>());
    entry.offset = decoder.value<uint64_t>();
    entry.size = decoder.value<uint64_t>();
    entry.seed = decoder.value<uint32_t>();
    if (!decoder.whole()) {
      throw_not_packed(path, format("entry {} of its index does not fit", i));
    }
    if (entry.offset > index.start || entry.size > index.start - entry.offset) {
      throw_not_packed(path, format("entry '{}' lies outside of the file", entry.name));
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

std::vector<PackedEntry> read_stock_entries(const std::string& path, const uint8_t* data, size_t size) {
  return read_index(path, data, size).entries;
}

StockPacked::StockPacked(const ScratchFile& packed) : size(packed.file().size()) {
  if (size != 0) {
    map = Mapping(packed.file(), 0, size, Mapping::Kind::ReadOnly);
    entries = read_stock_entries(packed.path(), map.data(), size);
  }
}

PackedTable read_packed_table(const std::string& path, const uint8_t* data, size_t size) {
  TableIndex index = read_index(path, data, size);
  if (size - kFooter - index.end != kTrailer) {
    throw_not_packed(path, "it has no digests");
  }
  Decoder trailer(data, index.end, size - kFooter);
  const auto start = trailer.value<uint64_t>();
  const auto length = trailer.value<uint64_t>();
  const auto expected = trailer.value<Digest>();
  if (trailer.text(8) != kTrailerMagic) {
    throw_not_packed(path, "it has no digests");
  }
  const uint64_t of_entries = index.entries.size() * kAboutEntry;
  if (start > index.start || length != index.start - start || length < of_entries + 16) {
    throw_not_packed(path, "its digests do not fit");
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
  Decoder decoder(data, start, index.start);
  PackedTable table{std::move(index.entries), {}, {}};
  for (PackedEntry& entry : table.entries) {
    if (entry.size > start || entry.offset > start - entry.size) {
      throw_not_packed(path, format("entry '{}' lies outside of the file", entry.name));
    }
    entry.digest = decoder.value<Digest>();
    entry.map = decoder.value<uint32_t>();
  }
  for (auto left = decoder.value<uint64_t>(); left > 0 && decoder.whole(); --left) {
    table.covers.insert(decoder.value<Digest>());
  }
  for (auto left = decoder.value<uint64_t>(); left > 0 && decoder.whole(); --left) {
    const std::string_view text = decoder.text(decoder.value<uint64_t>());
    std::optional<PackedMap> map = PackedMap::decode(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    if (!map) {
      throw_not_packed(path, "one of its maps is not valid");
    }
    table.maps.push_back(std::move(*map));
  }
  if (!decoder.whole()) {
    throw_not_packed(path, "its digests do not fit");
  }
  for (const PackedEntry& entry : table.entries) {
    if (entry.map > table.maps.size()) {
      throw_not_packed(path, format("entry '{}' has a map that is not there", entry.name));
    }
  }
  return table;
}

Verified verify_packed(const std::string& path, const uint8_t* data, const PackedTable& table) {
  Verified verified;
  const auto compare = [&](const PackedEntry& entry, const Digest& recorded, const auto& written_meanwhile) {
    const Digest found = digest(data + entry.offset, entry.size);
    if (written_meanwhile()) {
      ++verified.unchecked;
      return;
    }
    verified.bytes += entry.size;
    if (found != recorded) {
      throw_error_in(
          ErrorKind::Integrity,
          path,
          "entry '{}' has the digest {}, {} was recorded",
          entry.name,
          to_string(found),
          to_string(recorded));
    }
  };
  const auto never = [] { return false; };
  const PackedIndex index(table.entries);
  const PackedEntry* state = index.find(kPackedState);
  if (state == nullptr) {
    for (const PackedEntry& entry : table.entries) {
      compare(entry, entry.digest, never);
    }
    return verified;
  }
  const PackedEntry* of_keys = index.find(kPackedKeys);
  if (of_keys == nullptr) {
    throw_not_packed(path, "it lacks the keys of its entries");
  }
  compare(*of_keys, of_keys->digest, never);
  const PackedKeys keys = decode_keys(path, data + of_keys->offset, of_keys->size);
  if (state->size != state_size(keys) || keys.size() + 2 != table.entries.size()) {
    throw_not_packed(path, "its state does not fit");
  }
  const uint8_t* at = data + state->offset + kStateHead;
  for (const auto& [name, sources] : keys) {
    const PackedEntry* entry = index.find(name);
    if (entry == nullptr) {
      throw_not_packed(path, "one of its keys belongs to no entry");
    }
    // a writer of an entry sets its digest to zero first, and to that of the new bytes last
    const auto now = [&] {
      Digest written;
      std::memcpy(written.data(), at, sizeof written);
      full_fence();
      return written;
    };
    const Digest before = now();
    if (before == Digest{}) {
      ++verified.unchecked;
    } else {
      compare(*entry, before, [&] {
        full_fence();
        return now() != before;
      });
    }
    at += digests_of(sources) * sizeof(Digest);
  }
  return verified;
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
    table.value(of_entry);
    table.value(entries[i].entry.map);
  }
  table.value(static_cast<uint64_t>(contents.covers.size()));
  for (const Digest& one : contents.covers) {
    table.value(one);
  }
  table.value(static_cast<uint64_t>(contents.maps.size()));
  for (const std::string& map : contents.maps) {
    table.value(static_cast<uint64_t>(map.size()));
    table.put(map.data(), map.size());
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    const PackedEntry& entry = entries[i].entry;
    table.value(static_cast<uint32_t>(entry.name.size()));
    table.put(entry.name.data(), entry.name.size());
    table.value(places.offsets[i]);
    table.value(entry.size);
    table.value(entry.seed);
  }
  const Digest of_table = digest(table.bytes.data(), table.bytes.size());
  table.value(places.digests);
  table.value(places.index - places.digests);
  table.value(of_table);
  table.put(kTrailerMagic, 8);
  table.value(places.index);
  table.value(static_cast<uint32_t>(entries.size()));
  table.value(kMagic);
  table.value(kVersion);
  out.write(table.bytes.data(), table.bytes.size());
  out.make_read_only();
  out.commit();
}

} // namespace blobstore::internal
