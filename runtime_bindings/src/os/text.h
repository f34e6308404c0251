// Texts with values in them, mostly those of errors. One function makes them all, so that each of the many places with
// a text is little code: no strings in between, which would have to be freed if something throws.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include <blobstore/error.h>

#include "os/processor.h"

namespace blobstore::internal {

/// A value that a text shows: a text or an integer.
union Shown {
  const void* text;
  uint64_t number;
};

/// What a `Shown` holds. The kinds of up to 16 values are one number, that of the first in the lowest bits.
enum ShownKind : uint64_t { kNothing, kCharacters, kString, kView, kSigned, kUnsigned };
constexpr unsigned kShownBits = 4;

template <typename T>
constexpr ShownKind kShownKind = std::is_same_v<T, std::string> ? kString
    : std::is_same_v<T, std::string_view>                       ? kView
    : std::is_convertible_v<T, const char*>                     ? kCharacters
    : std::is_signed_v<T>                                       ? kSigned
                                                                : kUnsigned;
template <typename... T>
constexpr uint64_t kShownKinds = [] {
  static_assert(sizeof...(T) * kShownBits <= 64);
  uint64_t kinds = 0;
  unsigned shift = 0;
  ((kinds |= uint64_t{kShownKind<T>} << shift, shift += kShownBits), ...);
  return kinds;
}();

template <typename T>
BLOBSTORE_INLINE Shown show(const T& value) {
  Shown made;
  if constexpr (kShownKind<T> == kCharacters) {
    made.text = static_cast<const char*>(value);
  } else if constexpr (std::is_class_v<T>) {
    static_assert(kShownKind<T> == kString || kShownKind<T> == kView);
    made.text = &value;
  } else {
    static_assert(std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char>);
    made.number = static_cast<uint64_t>(value); // NOLINT(bugprone-signed-char-misuse): as a number
  }
  return made;
}

inline bool ends_with(std::string_view text, std::string_view ending) {
  return text.size() >= ending.size() && text.substr(text.size() - ending.size()) == ending;
}

std::string format_shown(const char* text, uint64_t kinds, const Shown* values);
/// @param path nullptr if the error is not about a file.
[[noreturn]] void throw_shown(
    ErrorKind kind, const std::string* path, const char* reason, uint64_t kinds, const Shown* values);

/// Throw an Error FileAccess with the system's text for an error number.
[[noreturn]] void throw_errno(const std::string& path, int number);

/// A text, a literal, in which each {} stands for the next value.
template <typename... T>
BLOBSTORE_INLINE std::string format(const char* text, const T&... values) {
  const Shown all[] = {show(values)..., {}};
  return format_shown(text, kShownKinds<T...>, all);
}

/// Throw an Error with such a text.
template <typename... T>
[[noreturn]] BLOBSTORE_INLINE void throw_error(ErrorKind kind, const char* reason, const T&... values) {
  const Shown all[] = {show(values)..., {}};
  throw_shown(kind, nullptr, reason, kShownKinds<T...>, all);
}

/// The same for an Error that is about a file.
template <typename... T>
[[noreturn]] BLOBSTORE_INLINE void throw_error_in(
    ErrorKind kind, const std::string& path, const char* reason, const T&... values) {
  const Shown all[] = {show(values)..., {}};
  throw_shown(kind, &path, reason, kShownKinds<T...>, all);
}

/// Texts with others in between, each as `shown` makes it.
template <typename Range, typename Make>
std::string joined(const Range& range, std::string_view between, Make shown) {
  std::string text;
  for (const auto& each : range) {
    text.append(text.empty() ? std::string_view() : between).append(shown(each));
  }
  return text;
}
template <typename Range>
std::string joined(const Range& texts, std::string_view between) {
  return joined(texts, between, [](const auto& text) -> const auto& { return text; });
}
template <typename Range>
std::string in_quotes(const Range& texts, std::string_view between = ", ") {
  return joined(texts, between, [](const auto& text) { return format("'{}'", text); });
}

} // namespace blobstore::internal
