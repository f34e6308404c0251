#include "program/bound_program.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "os/file.h"
#include "os/text.h"
#include "program/flatbuffer_editor.h"
#include "program/program_schema.h"

namespace blobstore::internal {
namespace {

/// Whether constants lie in the flatbuffer itself, as in old programs. One empty entry stands for "no data".
bool has_inline_constants(const FlatBuffer& buffer, uint64_t program) {
  const FlatVector constants = buffer.vector(program, kConstantBuffer, 4);
  return constants.count > 1 || (constants.count == 1 && buffer.vector(buffer.element(constants, 0), 0, 1).count != 0);
}

/// The constants that a program has already, and where it refers to them.
struct OldConstants {
  uint64_t constant_slot; // position of the reference to the list of constants
  uint64_t segments_slot; // position of the reference to the list of segments
  uint64_t inline_slot; // position of the reference to constants in the flatbuffer, or 0
  FlatVector offsets; // of the constants in their segment
  FlatVector segments;
  const uint8_t* data = nullptr; // of their segment, or null
  uint64_t size = 0;

  /// Number of constants that stay; constant 0 stands for "no data".
  uint32_t count() const { return std::max<uint32_t>(offsets.count, 1); }
};

/// @returns empty if this program cannot get more constants.
std::optional<OldConstants> find_old_constants(const ProgramFileView& program) {
  const FlatBuffer& buffer = program.buffer;
  const uint64_t root = buffer.root();
  OldConstants old{};
  old.constant_slot = buffer.field(root, kConstantSegment, 4);
  old.segments_slot = buffer.field(root, kSegments, 4);
  old.inline_slot = buffer.field(root, kConstantBuffer, 4);
  if (old.constant_slot == 0 || old.segments_slot == 0 || has_inline_constants(buffer, root)) {
    return std::nullopt;
  }
  const uint64_t constant_segment = buffer.follow(old.constant_slot);
  old.offsets = buffer.vector(constant_segment, 1, 8);
  const uint32_t number = buffer.u32_field(constant_segment, 0);
  old.segments = buffer.vector_at(buffer.follow(old.segments_slot), 4);
  if (old.offsets.count <= 1) {
    return old;
  }
  if (number >= old.segments.count) {
    return std::nullopt; // ExecuTorch will report it
  }
  const uint64_t segment = buffer.element(old.segments, number);
  const uint64_t offset = buffer.u64_field(segment, 0);
  old.size = buffer.u64_field(segment, 1);
  const uint64_t room = program.file_size - program.segment_base;
  if (offset > room || old.size > room - offset) {
    throw_format_error("truncated: the constants do not lie within the file");
  }
  old.data = program.file + program.segment_base + offset;
  return old;
}

/// The blobs that tensors are bound to, and the memory from the lowest to the highest of them.
struct BoundBlobs {
  std::vector<const Blob*> blobs;
  std::vector<const std::string*> keys; // parallel to the blobs
  std::vector<std::pair<const TensorUse*, uint32_t>> tensors; // each with the index of its blob
  uintptr_t low = UINTPTR_MAX;
  uintptr_t high = 0;

  void cover(const void* data, size_t size) {
    const auto at = reinterpret_cast<uintptr_t>(data);
    low = std::min(low, at);
    high = std::max(high, at + size);
  }
};

BoundBlobs find_blobs(
    const FlatBuffer& buffer, const std::vector<TensorUse>& uses, const BlobCache& cache, const std::string& path) {
  BoundBlobs bound;
  std::unordered_map<const std::string*, uint32_t> numbers; // key -> index of its blob
  numbers.reserve(uses.size());
  bound.blobs.reserve(uses.size());
  bound.tensors.reserve(uses.size());
  for (const TensorUse& use : uses) {
    auto found = numbers.find(use.key);
    if (found == numbers.end()) {
      const Blob* blob = cache.find(*use.key);
      if (blob == nullptr) {
        continue; // embedded, and the cache does not override it
      }
      found = numbers.emplace(use.key, static_cast<uint32_t>(bound.blobs.size())).first;
      bound.blobs.push_back(blob);
      bound.keys.push_back(use.key);
      bound.cover(blob->data, std::max<size_t>(blob->size, 1));
    }
    const Blob& blob = *bound.blobs[found->second];
    if (!has_layout(buffer, use.table, blob.layout)) {
      throw_error_in(
          ErrorKind::Layout,
          path,
          "'{}' is {} in the program and {} in {}",
          *use.key,
          to_string(tensor_layout(buffer, use.table)),
          to_string(blob.layout),
          cache.name());
    }
    bound.tensors.emplace_back(&use, found->second);
  }
  return bound;
}

/// Append the tensors as constants. @param first the number of the first new constant.
void put_tensors(FlatBufferEditor& editor, const FlatBuffer& buffer, const BoundBlobs& bound, uint32_t first) {
  const uint64_t tensor_vtable = editor.put_vtable({24, 24, 20, 0, 4, 8, 21, 12, 0, 22, 23, 16});
  const uint64_t extra_vtable = editor.put_vtable({8, 8, 0, 4});
  std::vector<std::vector<uint64_t>> named(bound.blobs.size()); // where the new tensors refer to their names
  for (const auto& [use, number] : bound.tensors) {
    const uint64_t table = editor.start_table(tensor_vtable);
    editor.links.emplace_back(use->value_slot, table);
    editor.put<uint32_t>(0); // sizes
    editor.put<uint32_t>(0); // dim_order
    editor.put<uint32_t>(first + number); // data_buffer_idx
    editor.put<uint32_t>(0); // extra_tensor_info
    for (const unsigned field : {kScalarType, kRequiresGrad, kLayoutField, kDynamism}) {
      editor.put<uint8_t>(buffer.u8_field(use->table, field));
    }
    const FlatVector sizes = buffer.vector(use->table, kSizes, 4);
    editor.link_here(table + 4);
    editor.put<uint32_t>(sizes.count);
    editor.put_bytes(buffer.data() + sizes.start, 4ull * sizes.count);
    const FlatVector order = buffer.vector(use->table, kDimOrder, 1);
    editor.link_here(table + 8);
    editor.put<uint32_t>(order.count);
    editor.put_bytes(buffer.data() + order.start, order.count);
    editor.align(4);
    editor.link_here(table + 16);
    const uint64_t extra = editor.start_table(extra_vtable);
    editor.put<uint32_t>(0); // fully_qualified_name
    named[number].push_back(extra + 4);
  }
  for (size_t i = 0; i < bound.keys.size(); ++i) {
    const std::string& key = *bound.keys[i];
    editor.align(4);
    for (const uint64_t reference : named[i]) {
      editor.link_here(reference);
    }
    editor.put<uint32_t>(static_cast<uint32_t>(key.size()));
    editor.put_bytes(reinterpret_cast<const uint8_t*>(key.data()), key.size() + 1); // and the NUL
  }
}

/// Append the list of constants: the old ones and the blobs, all counted from the lowest address.
void put_offsets(FlatBufferEditor& editor, const FlatBuffer& buffer, const OldConstants& old, const BoundBlobs& bound) {
  const uint64_t vtable = editor.put_vtable({8, 12, 4, 8});
  const uint64_t table = editor.start_table(vtable);
  editor.links.emplace_back(old.constant_slot, table);
  editor.put<uint32_t>(old.segments.count); // the segment that put_segments adds
  const uint64_t reference = editor.put<uint32_t>(0);
  editor.align(8, 4);
  editor.link_here(reference);
  editor.put<uint32_t>(old.count() + static_cast<uint32_t>(bound.blobs.size()));
  const uint64_t skipped = old.data ? reinterpret_cast<uintptr_t>(old.data) - bound.low : 0;
  for (uint32_t i = 0; i < old.count(); ++i) {
    uint64_t offset = 0;
    if (i < old.offsets.count) {
      std::memcpy(&offset, buffer.data() + old.offsets.start + 8ull * i, 8);
    }
    editor.put<uint64_t>(offset > old.size ? UINT64_MAX : offset + skipped); // ExecuTorch refuses the former
  }
  for (const Blob* blob : bound.blobs) {
    editor.put<uint64_t>(reinterpret_cast<uintptr_t>(blob->data) - bound.low);
  }
}

/// Append the list of segments again, because a reference from there cannot lead back, with one more that stands for
/// the memory of the cache.
void put_segments(FlatBufferEditor& editor, const FlatBuffer& buffer, const OldConstants& old, uint64_t segment_base) {
  const uint64_t vtable = editor.put_vtable({8, 24, 8, 16});
  const FlatVector& segments = old.segments;
  editor.align(4);
  editor.links.emplace_back(old.segments_slot, editor.end());
  editor.put<uint32_t>(segments.count + 1);
  const uint64_t list = editor.end();
  for (uint32_t i = 0; i <= segments.count; ++i) {
    editor.put<uint32_t>(0);
  }
  for (uint32_t i = 0; i <= segments.count; ++i) {
    const uint64_t segment = i < segments.count ? buffer.element(segments, i) : 0;
    editor.align(8);
    editor.link_here(list + 4ull * i);
    editor.start_table(vtable);
    editor.put<uint32_t>(0);
    editor.put<uint64_t>(segment ? buffer.u64_field(segment, 0) : kBoundConstants - segment_base);
    editor.put<uint64_t>(segment ? buffer.u64_field(segment, 1) : 8);
  }
}

/// A program has constants either in the flatbuffer or in a segment, so the former become an empty list.
void put_no_inline_constants(FlatBufferEditor& editor, const OldConstants& old) {
  if (old.inline_slot != 0) {
    editor.align(4);
    editor.links.emplace_back(old.inline_slot, editor.end());
    editor.put<uint32_t>(0);
  }
}

/// The old bytes and the new ones, with all references in place.
std::vector<uint64_t> assemble(const ProgramFileView& program, const FlatBufferEditor& editor) {
  std::vector<uint64_t> words(editor.end() / 8);
  auto* out = reinterpret_cast<uint8_t*>(words.data());
  std::memcpy(out, program.buffer.data(), program.buffer.size());
  std::memcpy(out + editor.base, editor.tail.data(), editor.tail.size());
  for (const auto& [from, to] : editor.links) {
    const auto distance = static_cast<uint32_t>(to - from);
    std::memcpy(out + from, &distance, sizeof distance);
  }
  if (program.has_header) {
    const uint64_t size = editor.end();
    std::memcpy(out + kProgramSizeAt, &size, sizeof size);
  }
  return words;
}

} // namespace

std::optional<BoundProgram> bind_tensors(
    const ProgramFileView& program,
    const std::vector<TensorUse>& uses,
    const BlobCache& cache,
    const std::string& path) {
  const FlatBuffer& buffer = program.buffer;
  const std::optional<OldConstants> old = find_old_constants(program);
  if (!old) {
    return std::nullopt;
  }
  BoundBlobs bound = find_blobs(buffer, uses, cache, path);
  if (bound.tensors.empty()) {
    return std::nullopt;
  }
  if (old->data != nullptr) {
    bound.cover(old->data, old->size);
  }
  FlatBufferEditor editor;
  editor.base = align_up(buffer.size(), 8);
  editor.tail.reserve(128 * bound.tensors.size() + 4096);
  editor.links.reserve(bound.tensors.size() + 4);
  put_tensors(editor, buffer, bound, old->count());
  put_offsets(editor, buffer, *old, bound);
  put_segments(editor, buffer, *old, program.segment_base);
  put_no_inline_constants(editor, *old);
  editor.align(8);
  if (editor.end() > INT32_MAX) {
    return std::nullopt; // a flatbuffer has at most 2 GB
  }
  BoundProgram result;
  result.words = assemble(program, editor);
  result.size = editor.end();
  result.constants = reinterpret_cast<const uint8_t*>(bound.low);
  result.constants_size = bound.high - bound.low;
  return result;
}

} // namespace blobstore::internal
