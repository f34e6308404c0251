// A .pte in memory: what it needs from a cache, and its bytes with tensors bound to the memory of the cache.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <blobstore/cache.h>

#include "format/flatbuffer.h"
#include "format/text_hash.h"
#include "os/file.h"
#include "program/bound_program.h"

namespace blobstore::internal {

/// A tensor whose bytes are not in the program.
struct Need {
  const std::string* key; // owned by the image
  std::optional<Layout> layout; // empty if this version does not know its type
};

/// An operator of ExecuTorch. The image owns the texts.
struct Operator {
  const std::string* name;
  const std::string* overload; // may be empty
};

/// The bytes of a program, as ExecuTorch will see them.
///
/// ExecuTorch 1.5 finds each external tensor of a method by comparing its name with the names of all tensors before it,
/// twice; with 20,000 tensors this takes nearly all of the loading time. So tensors are bound here: in a copy of the
/// flatbuffer, such a tensor becomes a constant of the program, and the base of the constants moves so that their
/// offsets lead into the cache. The file is not changed. A program that cannot be bound, because a later version wrote
/// fields that are unknown here, is loaded as it is through the data map, which is slower.
class ProgramImage {
 public:
  /// @throws Error FileAccess, InvalidFile.
  explicit ProgramImage(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<std::string>& methods() const { return methods_; }
  /// The external tensors of a method, each key once.
  const std::vector<Need>& needs(size_t method) const { return needs_[method]; }
  /// Ids of the backends of a method's delegates, each once.
  const std::vector<const std::string*>& backends(size_t method) const { return backends_[method]; }
  /// Names and overloads of the operators that a method calls.
  const std::vector<Operator>& operators(size_t method) const { return operators_[method]; }
  /// The names of a method's inputs; empty texts where the program records none.
  const std::vector<std::string>& input_names(size_t method) const { return input_names_[method]; }
  /// For each input of a method, whether another tensor was planned into its memory: one that is used later, or a view
  /// of the input. No operator computes such a view, so the bytes of the input must be in that memory.
  const std::vector<bool>& overlaid_inputs(size_t method) const { return overlaid_inputs_[method]; }

  /// Bind all tensors that the cache has. Must be called once. The cache must outlive the image.
  ///
  /// @throws Error KeyNotFound, which names the missing keys; Layout.
  void bind(const BlobCache& cache);

  const std::vector<uint64_t>& flatbuffer() const { return program_; } // words, for alignment
  size_t flatbuffer_size() const { return program_size_; }
  /// The whole file, mapped.
  const Mapping& whole() const { return map_; }
  uint64_t file_size() const { return file_size_; }
  /// Where constants are counted from, and how far they reach; null if no tensor is bound.
  const uint8_t* constants() const { return constants_; }
  size_t constants_size() const { return constants_size_; }

 private:
  void read_methods(const FlatBuffer& buffer);
  std::vector<Need> read_values(const FlatBuffer& buffer, const FlatVector& values);
  std::vector<const std::string*> read_backends(const FlatBuffer& buffer, uint64_t plan);
  std::vector<Operator> read_operators(const FlatBuffer& buffer, uint64_t plan);
  void read_value(
      const FlatBuffer& buffer, uint64_t value, std::vector<Need>& needs, std::unordered_set<const std::string*>& seen);
  const std::string* name(const FlatBuffer& buffer, uint64_t table, unsigned field);
  void check(const BlobCache& cache) const;
  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(program_.data()); }
  [[noreturn]] void fail(const std::string& reason) const;

  File file_;
  Mapping map_;
  uint64_t file_size_ = 0;
  uint64_t segment_base_ = 0;
  bool has_header_ = false;
  std::vector<uint64_t> program_;
  size_t program_size_ = 0;
  std::deque<std::string> names_; // each text once
  TextMap<const std::string*> names_by_text_;
  std::unordered_map<uint64_t, const std::string*> names_by_place_;
  std::vector<std::string> methods_;
  std::vector<std::vector<Need>> needs_;
  std::vector<std::vector<const std::string*>> backends_;
  std::vector<std::vector<Operator>> operators_;
  std::vector<std::vector<bool>> overlaid_inputs_;
  std::vector<std::vector<std::string>> input_names_;
  std::vector<TensorUse> uses_;
  const uint8_t* constants_ = nullptr;
  size_t constants_size_ = 0;
};

} // namespace blobstore::internal
