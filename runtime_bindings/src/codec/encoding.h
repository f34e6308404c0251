// How the bytes of a blob are stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace blobstore::internal {

/// Bytes of a blob that are encoded together; a processor's cache holds what becomes of one chunk.
constexpr size_t kChunk = size_t{1} << 20;

/// Stored bytes of a chunk: at most codes of half a byte, and beside them all of its elements, and the heads of
/// streams.
constexpr size_t kMostStored = kChunk + kChunk / 2 + 64;

struct Encoding {
  enum class Kind : uint8_t { Raw, Planes, Near };

  Kind kind = Kind::Raw;
  uint8_t width = 1; // bytes of an element
  bool floating = false; // Near: elements are ordered by value
  uint8_t bits = 0; // Near: of the numbers that are stored several in a byte: 0, 2 or 4
};

/// What `raw`, `planes:W` or `near:T:B` says; nothing if it says none of them.
std::optional<Encoding> read_encoding(std::string_view text);

} // namespace blobstore::internal
