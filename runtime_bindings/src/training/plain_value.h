// Plain values with tensors among them, such as the options and the state of an optimizer, and JSON for them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/layout.h>

#include "format/json.h"

namespace blobstore::internal {

/// A tensor that owns its memory.
struct SavedTensor {
  Layout layout;
  std::vector<uint8_t> bytes;
};

/// Tensors by key, in the order of a file.
using SavedTensors = std::vector<std::pair<std::string, std::shared_ptr<const SavedTensor>>>;
using TensorsByKey = std::map<std::string, std::shared_ptr<const SavedTensor>, std::less<>>;

/// One value.
struct PlainValue {
  enum class Kind { None, Bool, Integer, Float, Text, Tensor, List, Tuple, Dict };

  Kind kind = Kind::None;
  double number = 0; // of a Float; 0 or 1 for a Bool
  std::string text; // of a Text; the digits of an Integer, which has any number of them
  std::shared_ptr<const SavedTensor> tensor;
  std::vector<std::pair<std::string, PlainValue>> items; // with empty names, except in a Dict

  static PlainValue of(bool value);
  static PlainValue of(double value);
  static PlainValue of(SavedTensor value);
  static PlainValue pair(double first, double second);
  static PlainValue dict() { return of_kind(Kind::Dict); }
  static PlainValue of_kind(Kind kind) {
    PlainValue made;
    made.kind = kind;
    return made;
  }

  /// The value of a name of a Dict; null if there is none.
  const PlainValue* find(std::string_view name) const;
  /// Set the value of a name of a Dict, in its place or at the end.
  void set(const std::string& name, PlainValue value);
  /// Whether it is an Integer or a Float, and its number.
  bool is_number() const { return kind == Kind::Integer || kind == Kind::Float; }
  double as_number() const;
};

/// Append text as a string of JSON in ASCII.
/// @param text UTF-8, or halves of surrogate pairs as `JsonReader` reads them.
void append_json(std::string& json, std::string_view text);

/// Append a value as JSON; each tensor becomes a reference to its key.
///
/// @param key of the value if it is a tensor, and the beginning of the keys of tensors in it.
/// @param tensors receives the tensors.
void append_json(std::string& json, const PlainValue& value, const std::string& key, SavedTensors& tensors);

/// Read what `append_json` wrote. @param tensors of the file.
/// @throws FormatError: it cannot have written this.
PlainValue read_plain_value(JsonReader& json, const TensorsByKey& tensors);

} // namespace blobstore::internal
