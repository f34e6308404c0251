// A .pte in memory: what it asks of a cache, and its tensors bound to the cache's memory.
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

#include "file.h"
#include "flatbuffer.h"
#include "text_hash.h"

namespace blobstore {

/// Where in the file ExecuTorch looks for the constants of a bound program: no file is that long.
constexpr uint64_t kBoundConstants = uint64_t{1} << 62;

/// A tensor whose bytes are not in the program.
struct Need {
  const std::string* key; // the image's
  std::optional<Layout> layout; // nothing: of a kind that this version does not know
  bool is_copied = false; // into the method's own memory, as trained parameters are
};

/// An operator of ExecuTorch; the texts are the image's.
struct Operator {
  const std::string* name;
  const std::string* overload; // may be empty
};

/// The bytes of a program, as ExecuTorch is to see them.
///
/// ExecuTorch 1.5 finds each external tensor of a method by comparing its name with those of all that it found before,
/// twice: at 20,000 tensors that is all of the time. So tensors are bound here: in a copy of the program's flatbuffer
/// such a tensor becomes a constant of the program, and the place that its constants are counted from is moved so that
/// the distances lead into the cache. The file is not changed. A program that cannot be bound (a later version with
/// fields that are not known here) is loaded as it is, through the data map, only slower.
class ProgramImage {
 public:
  /// @throws Error FileAccess, InvalidFile.
  explicit ProgramImage(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<std::string>& methods() const { return methods_; }
  /// Each key once for each method that asks for it.
  const std::vector<Need>& needs(size_t method) const { return needs_[method]; }
  /// Ids of the backends that a method's delegates are made by.
  const std::vector<const std::string*>& backends(size_t method) const { return backends_[method]; }
  /// Names and overloads of the operators that a method calls.
  const std::vector<Operator>& operators(size_t method) const { return operators_[method]; }
  /// Of each input of a method, whether another tensor was planned into its memory: one that is used later, or a view of
  /// the input, for which there is no operator, so that it is found there or nowhere.
  const std::vector<bool>& overlaid_inputs(size_t method) const { return overlaid_inputs_[method]; }

  /// Bind all constants that the cache has; call it once.
  ///
  /// @throws Error KeyNotFound, naming every key that is missing; Layout.
  void bind(const BlobCache& cache);

  const std::vector<uint64_t>& flatbuffer() const { return program_; } // words, for alignment
  size_t flatbuffer_size() const { return program_size_; }
  const Mapping& whole() const { return map_; }
  uint64_t file_size() const { return file_size_; }
  /// Where constants are counted from, and how far they reach; null without bound tensors.
  const uint8_t* constants() const { return constants_; }
  size_t constants_size() const { return constants_size_; }

 private:
  struct Use { // of a tensor that may be bound
    uint64_t value_slot; // where the flatbuffer refers to the tensor
    uint64_t table;
    const std::string* key; // one of names_
    bool external;
  };
  struct Editor;

  void read_methods(const FlatBuffer& buffer);
  void read_value(
      const FlatBuffer& buffer,
      uint64_t value,
      std::vector<Need>& needs,
      std::unordered_set<const std::string*>& seen);
  const std::string* name(const FlatBuffer& buffer, uint64_t table, unsigned field);
  void check(const BlobCache& cache) const;
  void write_bound(const BlobCache& cache);
  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(program_.data()); }
  Error fail(const std::string& reason) const { return Error(ErrorKind::InvalidFile, path(), reason); }

  File file_;
  Mapping map_;
  uint64_t file_size_ = 0;
  uint64_t segment_base_ = 0;
  bool has_header_ = false;
  std::vector<uint64_t> program_;
  size_t program_size_ = 0;
  std::deque<std::string> names_; // each text once, however many tables refer to it
  TextMap<const std::string*> names_by_text_;
  std::unordered_map<uint64_t, const std::string*> names_by_place_;
  std::vector<std::string> methods_;
  std::vector<std::vector<Need>> needs_;
  std::vector<std::vector<const std::string*>> backends_;
  std::vector<std::vector<Operator>> operators_;
  std::vector<std::vector<bool>> overlaid_inputs_;
  std::vector<Use> uses_;
  const uint8_t* constants_ = nullptr;
  size_t constants_size_ = 0;
};

} // namespace blobstore
