#include "training/plain_value.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "format/format_error.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr char kHexDigits[] = "0123456789abcdef";
constexpr int kFraction = 52; // bits of a double behind the point
constexpr size_t kFractionDigits = kFraction / 4;
constexpr int kBias = 1023;

/// A double as Python's float.hex writes it.
std::string hex_of(double number) {
  if (std::isnan(number)) {
    return "nan";
  }
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof bits);
  std::string text = std::signbit(number) ? "-" : "";
  if (std::isinf(number)) {
    return text + "inf";
  }
  const int exponent = static_cast<int>(bits >> kFraction & 0x7ff);
  text += exponent == 0 ? "0x0." : "0x1.";
  if (number == 0) {
    return text + "0p+0";
  }
  for (int shift = kFraction - 4; shift >= 0; shift -= 4) {
    text += kHexDigits[bits >> shift & 0xf];
  }
  const int shown = exponent == 0 ? 1 - kBias : exponent - kBias;
  return text + (shown < 0 ? "p" : "p+") + std::to_string(shown);
}

/// The number that a text is in digits of a base, without a sign, if it is one.
template <typename Number>
std::optional<Number> whole_number(std::string_view text, int base) {
  Number number = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, number, base);
  return error == std::errc() && at == end ? std::optional(number) : std::nullopt;
}

bool take(std::string_view& text, std::string_view word) {
  if (text.substr(0, word.size()) != word) {
    return false;
  }
  text.remove_prefix(word.size());
  return true;
}

/// The number that `hex_of` writes like this, if any.
std::optional<double> from_hex(std::string_view text) {
  const double sign = take(text, "-") ? -1 : 1;
  if (text == "inf") {
    return sign * std::numeric_limits<double>::infinity();
  }
  if (text == "nan") {
    return std::numeric_limits<double>::quiet_NaN();
  }
  const bool is_normal = take(text, "0x1.");
  if (!is_normal && !take(text, "0x0.")) {
    return std::nullopt;
  }
  const std::string_view fraction = text.substr(0, text.find('p'));
  text.remove_prefix(fraction.size());
  const auto digits = whole_number<uint64_t>(fraction, 16);
  const bool is_small = take(text, "p-");
  const bool is_signed = is_small || take(text, "p+");
  const auto exponent = whole_number<unsigned>(text, 10);
  if (!digits || fraction.size() > kFractionDigits || !is_signed || !exponent || *exponent > kBias) {
    return std::nullopt;
  }
  const int places = 4 * static_cast<int>(fraction.size());
  const uint64_t mantissa = uint64_t{is_normal} << places | *digits;
  const int power = is_small ? -static_cast<int>(*exponent) : static_cast<int>(*exponent);
  return sign * std::ldexp(static_cast<double>(mantissa), power - places);
}

void append_unit(std::string& json, uint32_t unit) {
  json += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) {
    json += kHexDigits[unit >> shift & 0xf];
  }
}

/// The character at a position of UTF-8, and how many bytes it has.
std::pair<uint32_t, size_t> character_at(std::string_view text, size_t at) {
  const auto first = static_cast<uint8_t>(text[at]);
  const size_t bytes = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  constexpr uint8_t kMasks[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
  uint32_t code = first & kMasks[bytes];
  for (size_t i = 1; i < bytes && at + i < text.size(); ++i) {
    code = code << 6 | (static_cast<uint8_t>(text[at + i]) & 0x3f);
  }
  return {code, bytes};
}

} // namespace

PlainValue PlainValue::of(bool value) {
  PlainValue made = of_kind(PlainValue::Kind::Bool);
  made.number = value ? 1 : 0;
  return made;
}

PlainValue PlainValue::of(double value) {
  PlainValue made = of_kind(PlainValue::Kind::Float);
  made.number = value;
  return made;
}

PlainValue PlainValue::of(SavedTensor value) {
  PlainValue made = of_kind(PlainValue::Kind::Tensor);
  made.tensor = std::make_shared<const SavedTensor>(std::move(value));
  return made;
}

PlainValue PlainValue::pair(double first, double second) {
  PlainValue made = of_kind(PlainValue::Kind::Tuple);
  made.items.emplace_back("", of(first));
  made.items.emplace_back("", of(second));
  return made;
}

const PlainValue* PlainValue::find(std::string_view name) const {
  for (const auto& [own, value] : items) {
    if (own == name) {
      return &value;
    }
  }
  return nullptr;
}

void PlainValue::set(const std::string& name, PlainValue value) {
  for (auto& [own, old] : items) {
    if (own == name) {
      old = std::move(value);
      return;
    }
  }
  items.emplace_back(name, std::move(value));
}

double PlainValue::as_number() const {
  if (kind != PlainValue::Kind::Integer) {
    return number;
  }
  double value = 0;
  const bool negative = text[0] == '-';
  for (size_t i = negative ? 1 : 0; i < text.size(); ++i) {
    value = value * 10 + (text[i] - '0');
  }
  return negative ? -value : value;
}

void append_json(std::string& json, std::string_view text) {
  constexpr std::string_view kMeanings = "\"\\\b\f\n\r\t";
  constexpr std::string_view kLetters = "\"\\bfnrt";
  json += '"';
  for (size_t at = 0; at < text.size();) {
    const auto [code, bytes] = character_at(text, at);
    at += bytes;
    const size_t special = code < 0x80 ? kMeanings.find(static_cast<char>(code)) : std::string_view::npos;
    if (special != std::string_view::npos) {
      json += '\\';
      json += kLetters[special];
    } else if (code >= 0x20 && code < 0x7f) {
      json += static_cast<char>(code);
    } else if (code < 0x10000) {
      append_unit(json, code);
    } else {
      append_unit(json, 0xd800 + ((code - 0x10000) >> 10));
      append_unit(json, 0xdc00 + ((code - 0x10000) & 0x3ff));
    }
  }
  json += '"';
}

void append_json(std::string& json, const PlainValue& value, const std::string& key, SavedTensors& tensors) {
  const auto list = [&] {
    json += '[';
    for (size_t i = 0; i < value.items.size(); ++i) {
      json += i == 0 ? "" : ",";
      append_json(json, value.items[i].second, format("{}/{}", key, i), tensors);
    }
    json += ']';
  };
  switch (value.kind) {
    case PlainValue::Kind::None:
      json += "null";
      break;
    case PlainValue::Kind::Bool:
      json += value.number != 0 ? "true" : "false";
      break;
    case PlainValue::Kind::Integer:
      json += value.text;
      break;
    case PlainValue::Kind::Float:
      json += R"({"float":")" + hex_of(value.number) + "\"}";
      break;
    case PlainValue::Kind::Text:
      append_json(json, value.text);
      break;
    case PlainValue::Kind::Tensor:
      json += R"({"tensor":)";
      append_json(json, key);
      json += '}';
      tensors.emplace_back(key, value.tensor);
      break;
    case PlainValue::Kind::List:
      list();
      break;
    case PlainValue::Kind::Tuple:
      json += R"({"tuple":)";
      list();
      json += '}';
      break;
    case PlainValue::Kind::Dict:
      json += R"({"dict":{)";
      for (size_t i = 0; i < value.items.size(); ++i) {
        const auto& [name, item] = value.items[i];
        json += i == 0 ? "" : ",";
        append_json(json, name);
        json += ':';
        append_json(json, item, format("{}/{}", key, name), tensors);
      }
      json += "}}";
      break;
  }
}

namespace {

PlainValue read_items(JsonReader& json, PlainValue::Kind kind, const TensorsByKey& tensors) {
  PlainValue value;
  value.kind = kind;
  json.array([&] { value.items.emplace_back("", read_plain_value(json, tensors)); });
  return value;
}

/// What JSON has no value of its own for: an object with one field, the kind.
PlainValue read_kind(JsonReader& json, const std::string& kind, const TensorsByKey& tensors) {
  PlainValue value;
  if (kind == "tensor") {
    const std::string key = json.string();
    const auto found = tensors.find(key);
    if (found == tensors.end()) {
      throw_format_error("no tensor '{}' is listed", key);
    }
    value.kind = PlainValue::Kind::Tensor;
    value.tensor = found->second;
    return value;
  }
  if (kind == "float") {
    const std::string text = json.string();
    const std::optional<double> number = from_hex(text);
    if (!number) {
      throw_format_error("'{}' is not a hexadecimal float", text);
    }
    return PlainValue::of(*number);
  }
  if (kind == "tuple") {
    if (!json.at_array()) {
      throw_format_error("a tuple is not a list");
    }
    return read_items(json, PlainValue::Kind::Tuple, tensors);
  }
  if (kind == "dict") {
    value.kind = PlainValue::Kind::Dict;
    json.object([&](const std::string& name) { value.items.emplace_back(name, read_plain_value(json, tensors)); });
    return value;
  }
  throw_format_error("unknown kind of value '{}'", kind);
}

} // namespace

PlainValue read_plain_value(JsonReader& json, const TensorsByKey& tensors) {
  if (json.at_array()) {
    return read_items(json, PlainValue::Kind::List, tensors);
  }
  PlainValue value;
  if (json.at_string()) {
    value.kind = PlainValue::Kind::Text;
    value.text = json.string();
  } else if (json.at_object()) {
    size_t fields = 0;
    json.object([&](const std::string& kind) {
      if (fields++ > 0) {
        throw_format_error("a value has the kind '{}', too", kind);
      }
      value = read_kind(json, kind, tensors);
    });
    if (fields == 0) {
      throw_format_error("a value has no kind");
    }
  } else if (json.take_literal("true")) {
    value = PlainValue::of(true);
  } else if (json.take_literal("false")) {
    value = PlainValue::of(false);
  } else if (!json.take_literal("null")) {
    value.kind = PlainValue::Kind::Integer;
    value.text = json.integer();
  }
  return value;
}

} // namespace blobstore::internal
