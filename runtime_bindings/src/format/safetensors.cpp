#include "format/safetensors.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include <blobstore/error.h>

#include "format/json.h"
#include "format/ptd_bounds.h"
#include "format/utf8.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000; // the limit of the safetensors package itself
constexpr char kMetadata[] = "__metadata__";

struct Type {
  const char* name;
  int8_t scalar_type;
};
constexpr Type kTypes[] = {
    {"BOOL", 11},
    {"U8", 0},
    {"I8", 1},
    {"F8_E5M2", 23},
    {"F8_E4M3", 24},
    {"F8_E5M2FNUZ", 25},
    {"F8_E4M3FNUZ", 26},
    {"I16", 2},
    {"U16", 27},
    {"F16", 5},
    {"BF16", 15},
    {"I32", 3},
    {"U32", 28},
    {"F32", 6},
    {"C64", 9},
    {"F64", 7},
    {"I64", 4},
    {"U64", 29},
};

[[noreturn]] void refuse(const std::string& key, const std::string& reason) {
  throw_format_error("tensor '{}' {}", key, reason);
}

/// Sizes or offsets; @throws FormatError for anything else.
std::vector<uint64_t> read_numbers(JsonReader& json, const std::string& key) {
  std::vector<uint64_t> numbers;
  if (!json.at_array()) {
    refuse(key, "lacks dtype, shape or a pair of data_offsets");
  }
  json.array([&] {
    const std::optional<uint64_t> found = json.size();
    if (!found) {
      refuse(key, "must have a str as dtype, and non-negative integers as shape and offsets");
    }
    numbers.push_back(*found);
  });
  return numbers;
}

/// The bytes of a tensor, empty if that is no number of 64 bits.
std::optional<uint64_t> nbytes_of(int8_t scalar_type, const std::vector<uint64_t>& sizes) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return 0;
  }
  uint64_t nbytes = item_size(scalar_type);
  for (const uint64_t size : sizes) {
    if (nbytes > std::numeric_limits<uint64_t>::max() / size) {
      return std::nullopt;
    }
    nbytes *= size;
  }
  return nbytes;
}

/// The layout, empty if a size is above that of a .ptd.
std::optional<Layout> layout_of(int8_t scalar_type, const std::vector<uint64_t>& sizes) {
  Layout layout;
  layout.scalar_type = scalar_type;
  for (const uint64_t size : sizes) {
    if (size > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      return std::nullopt;
    }
    layout.dim_order.push_back(static_cast<uint8_t>(layout.sizes.size()));
    layout.sizes.push_back(static_cast<int32_t>(size));
  }
  return layout;
}

void read_metadata(JsonReader& json, SafetensorsTable& table) {
  if (!json.at_object()) {
    throw_format_error("__metadata__ must map str to str");
  }
  json.object([&](const std::string& key) {
    if (!json.at_string()) {
      throw_format_error("__metadata__ must map str to str");
    }
    const std::string value = json.string();
    if (!is_utf8(key) || !is_utf8(value)) {
      throw_format_error("the metadata under '{}' is not valid Unicode", key);
    }
    table.metadata.emplace(key, value);
  });
}

/// Give a tensor its layout, if its dtype has one.
void set_layout(SafetensorsEntry& entry) {
  const auto* type =
      std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type& one) { return entry.dtype == one.name; });
  if (type == std::end(kTypes)) {
    return;
  }
  if (entry.sizes.size() > kMaxRank) {
    refuse(entry.key, format("has {} dimensions, at most {} are possible", entry.sizes.size(), kMaxRank));
  }
  const std::optional<uint64_t> nbytes = nbytes_of(type->scalar_type, entry.sizes);
  if (nbytes != entry.end - entry.start) {
    refuse(
        entry.key,
        format(
            "is {} of {} bytes, but has {}",
            entry.dtype,
            nbytes ? std::to_string(*nbytes) : "more than 2**64",
            entry.end - entry.start));
  }
  entry.layout = layout_of(type->scalar_type, entry.sizes);
}

/// @param base where the bytes of the tensors begin.
/// @param room the number of bytes from there to the end of the file.
SafetensorsEntry read_tensor(JsonReader& json, const std::string& key, uint64_t base, uint64_t room) {
  SafetensorsEntry entry;
  entry.key = key;
  if (!is_utf8(key)) {
    throw_format_error("the name '{}' is not valid Unicode", key);
  }
  bool has_dtype = false;
  bool has_shape = false;
  std::vector<uint64_t> offsets;
  if (!json.at_object()) {
    refuse(key, "lacks dtype, shape or a pair of data_offsets");
  }
  json.object([&](const std::string& field) {
    if (field == "dtype") {
      if (!json.at_string()) {
        refuse(key, "must have a str as dtype, and non-negative integers as shape and offsets");
      }
      entry.dtype = json.string();
      has_dtype = true;
    } else if (field == "shape") {
      entry.sizes = read_numbers(json, key);
      has_shape = true;
    } else if (field == "data_offsets") {
      offsets = read_numbers(json, key);
    } else {
      json.skip();
    }
  });
  if (!has_dtype || !has_shape || offsets.size() != 2) {
    refuse(key, "lacks dtype, shape or a pair of data_offsets");
  }
  if (offsets[0] > offsets[1] || offsets[1] > room) {
    refuse(key, format("at {}..{} is not within the file", offsets[0], offsets[1]));
  }
  entry.start = base + offsets[0];
  entry.end = base + offsets[1];
  set_layout(entry);
  return entry;
}

void check_extents(const SafetensorsTable& table, uint64_t position, uint64_t size) {
  std::vector<const SafetensorsEntry*> order;
  for (const SafetensorsEntry& entry : table.entries) {
    order.push_back(&entry);
  }
  std::sort(order.begin(), order.end(), [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
    return std::pair(a->start, a->end) < std::pair(b->start, b->end);
  });
  for (const SafetensorsEntry* entry : order) {
    if (entry->start != position) {
      refuse(entry->key, format("starts at byte {}, expected {}: a gap or an overlap", entry->start, position));
    }
    position = entry->end;
  }
  if (position != size) {
    throw_format_error("the tensors end at byte {}, the file has {} bytes", position, size);
  }
}

SafetensorsTable read_header(const uint8_t* data, uint64_t size) {
  if (size < 8) {
    throw_format_error("{} bytes are too few for a .safetensors", size);
  }
  const uint64_t length = load_u64(data);
  if (length > std::min(size - 8, kMaxHeader)) {
    throw_format_error("the header should have {} bytes, the file has {}", length, size);
  }
  const std::string_view header(reinterpret_cast<const char*>(data) + 8, static_cast<size_t>(length));
  if (!is_utf8(header)) {
    throw_format_error("the header is not JSON: it is not UTF-8");
  }
  const uint64_t base = 8 + length;
  SafetensorsTable table;
  JsonReader json(header);
  if (!json.at_object()) {
    throw_format_error("the header is not a JSON object");
  }
  json.object([&](const std::string& key) {
    if (key == kMetadata) {
      read_metadata(json, table);
    } else {
      table.entries.push_back(read_tensor(json, key, base, size - base));
    }
  });
  json.end();
  check_extents(table, base, size);
  return table;
}

} // namespace

SafetensorsTable read_safetensors(const std::string& path, const uint8_t* data, uint64_t size) {
  try {
    return read_header(data, size);
  } catch (const FormatError& error) {
    throw_error_in(ErrorKind::InvalidFile, path, "{}", error.what());
  }
}

} // namespace blobstore::internal
