// Reading a flatbuffer whose bytes are not trusted: every step is checked, nothing outside the buffer is read, and the
// work is bounded. References may lead to one object again and again, so a small buffer can stand for gigabytes. Every
// reference that is followed and every vector is charged to a budget proportional to the size of the buffer, as in
// blobstore/core/formats/pte. Format: https://flatbuffers.dev/internals/
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "format/format_error.h"

namespace blobstore::internal {

/// A vector: position of its first item and number of items.
struct FlatVector {
  uint64_t start = 0;
  uint32_t count = 0;
};

/// A flatbuffer; does not own its memory. Positions count from the first byte. 0 stands for an absent object, because
/// no object can lie there.
class FlatBuffer {
 public:
  FlatBuffer(const uint8_t* data, size_t size) : data_(data), size_(size), budget_(8 * uint64_t{size} + (1 << 16)) {
    if (size < 8) {
      throw_format_error("{} bytes are too few for a flatbuffer", size);
    }
  }

  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  uint64_t root() const { return follow(0); }

  /// Position of a field in a table, 0 if the table does not have it.
  uint64_t field(uint64_t table, unsigned slot, unsigned field_size) const {
    const int64_t vtable = static_cast<int64_t>(table) - static_cast<int32_t>(u32(table));
    if (vtable < 0) {
      throw_format_error("an offset is negative or not aligned");
    }
    const auto at = static_cast<uint64_t>(vtable);
    const uint16_t vtable_size = u16(at);
    const uint16_t table_size = u16(at + 2);
    if (vtable_size < 4 || vtable_size % 2 != 0 || at + vtable_size > size_ || table + table_size > size_) {
      throw_format_error("a table, its vtable or a field does not fit in the flatbuffer");
    }
    const unsigned entry = 4 + 2 * slot;
    if (entry + 2 > vtable_size) {
      return 0;
    }
    const uint16_t offset = u16(at + entry);
    if (offset != 0 && (offset < 4 || offset + field_size > table_size)) {
      throw_format_error("a table, its vtable or a field does not fit in the flatbuffer");
    }
    return offset == 0 ? 0 : table + offset;
  }

  /// Number of fields that the vtable of a table lists.
  unsigned field_count(uint64_t table) const {
    field(table, 0, 1);
    return (u16(table - static_cast<int32_t>(u32(table))) - 4u) / 2u;
  }

  /// Where the offset stored at a position leads.
  uint64_t follow(uint64_t position) const {
    spend(8);
    return position + u32(position);
  }

  /// The object that an offset field of a table leads to, 0 if the field is absent.
  uint64_t object(uint64_t table, unsigned slot) const {
    const uint64_t at = field(table, slot, 4);
    return at == 0 ? 0 : follow(at);
  }

  /// The vector that a field leads to, empty where the field is absent.
  FlatVector vector(uint64_t table, unsigned slot, unsigned item_size) const {
    const uint64_t at = object(table, slot);
    return at == 0 ? FlatVector{} : vector_at(at, item_size);
  }

  FlatVector vector_at(uint64_t at, unsigned item_size) const {
    const uint32_t count = u32(at);
    if (static_cast<uint64_t>(count) * item_size > size_ || at + 4 + static_cast<uint64_t>(count) * item_size > size_) {
      throw_format_error("a vector is longer than the flatbuffer");
    }
    spend(static_cast<uint64_t>(count) * item_size);
    return {at + 4, count};
  }

  std::string_view string(uint64_t table, unsigned slot) const {
    const FlatVector text = vector(table, slot, 1);
    return {reinterpret_cast<const char*>(data_ + text.start), text.count};
  }

  /// The object that item `index` of a vector of offsets leads to.
  uint64_t element(const FlatVector& vector, uint32_t index) const { return follow(vector.start + 4ull * index); }

  // Scalars of a table, with the default of an absent field.
  uint8_t u8_field(uint64_t table, unsigned slot) const {
    const uint64_t at = field(table, slot, 1);
    return at == 0 ? 0 : u8(at);
  }
  uint32_t u32_field(uint64_t table, unsigned slot) const {
    const uint64_t at = field(table, slot, 4);
    return at == 0 ? 0 : u32(at);
  }
  uint64_t u64_field(uint64_t table, unsigned slot) const {
    const uint64_t at = field(table, slot, 8);
    return at == 0 ? 0 : u32(at) | static_cast<uint64_t>(u32(at + 4)) << 32;
  }

  double f64_field(uint64_t table, unsigned slot) const {
    const uint64_t bits = u64_field(table, slot);
    double number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  uint8_t u8(uint64_t at) const {
    check(at, 1);
    return data_[at];
  }
  uint16_t u16(uint64_t at) const {
    check(at, 2);
    uint16_t value;
    std::memcpy(&value, data_ + at, sizeof value);
    return value;
  }
  uint32_t u32(uint64_t at) const {
    check(at, 4);
    uint32_t value;
    std::memcpy(&value, data_ + at, sizeof value);
    return value;
  }

 private:
  void spend(uint64_t cost) const {
    if (cost > budget_) {
      throw_format_error("damaged flatbuffer: its tables refer to the same bytes again and again");
    }
    budget_ -= cost;
  }
  void check(uint64_t at, unsigned width) const {
    if (at % width != 0) {
      throw_format_error("an offset is negative or not aligned");
    }
    if (at > size_ || size_ - at < width) {
      throw_format_error("an offset leaves the flatbuffer");
    }
  }

  const uint8_t* data_;
  size_t size_;
  mutable uint64_t budget_;
};

} // namespace blobstore::internal
