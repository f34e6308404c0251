// Appending to a flatbuffer.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

namespace blobstore::internal {

/// Appends objects to a flatbuffer and lets its references lead to them. References lead forward only, and everything
/// that is appended lies behind what exists.
struct FlatBufferEditor {
  std::vector<uint8_t> tail; // what is appended
  uint64_t base; // where the tail will lie, a multiple of 8
  std::vector<std::pair<uint64_t, uint64_t>> links; // of references in the old bytes: position -> where it will lead

  /// Where the next byte will lie.
  uint64_t end() const { return base + tail.size(); }
  /// Pad, so that what follows after `and_then` more bytes is aligned.
  void align(size_t to, size_t and_then = 0) {
    while ((end() + and_then) % to != 0) {
      tail.push_back(0);
    }
  }
  template <typename T>
  uint64_t put(T value) { // @returns its position
    const uint64_t at = end();
    const auto* from = reinterpret_cast<const uint8_t*>(&value);
    tail.insert(tail.end(), from, from + sizeof value);
    return at;
  }
  void put_bytes(const uint8_t* from, size_t size) { tail.insert(tail.end(), from, from + size); }
  uint64_t put_vtable(std::initializer_list<uint16_t> entries) {
    align(2);
    const uint64_t at = end();
    for (const uint16_t entry : entries) {
      put(entry);
    }
    return at;
  }
  /// @returns the position of the table; its fields must follow.
  uint64_t start_table(uint64_t vtable) {
    align(4);
    return put(static_cast<int32_t>(end() - vtable));
  }
  /// Overwrite a number in the tail.
  void set(uint64_t at, uint32_t value) { std::memcpy(tail.data() + (at - base), &value, sizeof value); }
  /// Let a reference in the tail lead to the end.
  void link_here(uint64_t reference) { set(reference, static_cast<uint32_t>(end() - reference)); }
};

} // namespace blobstore::internal
