// Reading JSON whose bytes are not trusted, value by value, without a tree of values in memory. It accepts what
// Python's json module accepts, which is JSON (RFC 8259) with NaN and Infinity, but no object with a key twice.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/flatbuffer.h"

namespace blobstore::internal {

/// Reads one text, front to back; does not own it. Every function throws FormatError if the next value is malformed.
class JsonReader {
 public:
  /// @param text valid UTF-8.
  /// @param what as messages call it.
  explicit JsonReader(std::string_view text, const char* what = "the header") : text_(text), what_(what) {}

  /// Whether the next value is an object, an array, a string.
  bool at_object() { return peek() == '{'; }
  bool at_array() { return peek() == '['; }
  bool at_string() { return peek() == '"'; }

  /// Read an object; `field` must read the value of the key.
  void object(const std::function<void(const std::string& key)>& field);
  /// Read an array; `item` must read one item.
  void array(const std::function<void()>& item);
  /// A string as UTF-8. JSON can spell half of a surrogate pair: then it has the three bytes that UTF-8 forbids.
  std::string string();
  /// A number, if it is an integer in 0..2**63-1 without fraction or exponent; empty for another value, which is
  /// skipped.
  std::optional<uint64_t> size();
  /// A finite number; empty for another value, which is skipped.
  std::optional<double> real();
  /// The digits of an integer of any size, behind a "-" if it is negative.
  std::string integer();
  /// Skip a value. @returns its text.
  std::string_view skip();
  /// Read null, true, false, or another word, if it is the next value.
  bool take_literal(std::string_view word);
  /// @throws FormatError: there is more than white space left.
  void end();

 private:
  char peek();
  void expect(char wanted);
  bool take(char wanted);
  bool take_word(std::string_view word);
  std::string_view number();
  uint32_t escape();
  uint32_t four_digits();
  [[noreturn]] void fail(const std::string& reason) const;

  std::string_view text_;
  const char* what_;
  size_t at_ = 0;
  int depth_ = 0;
};

} // namespace blobstore::internal
