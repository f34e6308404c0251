// A program whose tensors are bound to the memory of a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/cache.h>

#include "format/flatbuffer.h"

namespace blobstore::internal {

/// Where ExecuTorch looks for the constants of a bound program, as a position in the file: no file is that long.
constexpr uint64_t kBoundConstants = uint64_t{1} << 62;

/// A tensor of a program that may be bound.
struct TensorUse {
  uint64_t value_slot; // where the flatbuffer refers to the tensor
  uint64_t table;
  const std::string* key; // one object for each text, so that pointers can be compared
};

/// A program as its file has it.
struct ProgramFileView {
  const FlatBuffer& buffer;
  const uint8_t* file; // mapped; may be longer than the flatbuffer
  uint64_t file_size;
  uint64_t segment_base; // where segments are counted from
  bool has_header;
};

/// A flatbuffer in which the tensors are constants whose offsets lead into the cache. It refers to memory of the cache
/// and of the file, which both must outlive it.
struct BoundProgram {
  std::vector<uint64_t> words; // for alignment
  size_t size = 0; // in bytes
  const uint8_t* constants = nullptr; // where constants are counted from
  size_t constants_size = 0; // how far they reach
};

/// Bind all tensors that the cache has.
///
/// @returns empty if the program must be loaded as it is: the cache has none of the tensors, or the program keeps its
///   constants in a way that this version cannot extend.
/// @throws Error Layout: a blob has another layout than the tensor. @throws FormatError: the program is damaged.
std::optional<BoundProgram> bind_tensors(
    const ProgramFileView& program,
    const std::vector<TensorUse>& uses,
    const BlobCache& cache,
    const std::string& path);

} // namespace blobstore::internal
