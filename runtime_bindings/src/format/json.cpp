#include "format/json.h"

#include <algorithm>
#include <limits>
#include <locale>
#include <sstream>

#include "format/utf8.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr int kMostDepth = 200; // each level takes stack
constexpr size_t kMostDigits = 4300; // of an integer, as Python reads

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Deeper by one level while it lives.
class Level {
 public:
  Level(int& depth, const char* what) : depth_(++depth) {
    if (depth_ > kMostDepth) {
      --depth_;
      throw_format_error("{} is nested too deeply", what);
    }
  }
  ~Level() { --depth_; }

 private:
  int& depth_;
};

} // namespace

void JsonReader::object(const std::function<void(const std::string& key)>& field) {
  const Level level(depth_, what_);
  std::vector<std::string> keys;
  expect('{');
  if (!take('}')) {
    do {
      if (!at_string()) {
        fail("a key is missing");
      }
      keys.push_back(string());
      expect(':');
      field(keys.back());
    } while (take(','));
    expect('}');
  }
  std::sort(keys.begin(), keys.end());
  const auto twice = std::adjacent_find(keys.begin(), keys.end());
  if (twice != keys.end()) {
    throw_format_error("key '{}' occurs twice", *twice);
  }
}

void JsonReader::array(const std::function<void()>& item) {
  const Level level(depth_, what_);
  expect('[');
  if (!take(']')) {
    do {
      item();
    } while (take(','));
    expect(']');
  }
}

std::string JsonReader::string() {
  expect('"');
  std::string text;
  while (true) {
    const size_t plain = at_;
    while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\' && static_cast<uint8_t>(text_[at_]) >= 0x20) {
      ++at_;
    }
    text.append(text_.substr(plain, at_ - plain));
    if (at_ == text_.size() || static_cast<uint8_t>(text_[at_]) < 0x20) {
      fail("a string does not end, or has a control character");
    }
    if (text_[at_++] == '"') {
      return text;
    }
    append_utf8(text, escape());
  }
}

/// The character that follows a backslash.
uint32_t JsonReader::escape() {
  constexpr std::string_view kLetters = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const char letter = at_ < text_.size() ? text_[at_++] : '\0';
  if (letter != 'u') {
    const size_t found = kLetters.find(letter);
    if (found == std::string_view::npos) {
      fail("a string has an escape that JSON does not have");
    }
    return static_cast<uint8_t>(kMeanings[found]);
  }
  const uint32_t code = four_digits();
  if (code < 0xd800 || code > 0xdbff || text_.substr(at_, 2) != "\\u") {
    return code;
  }
  const size_t second = at_;
  at_ += 2;
  const uint32_t low = four_digits();
  if (low < 0xdc00 || low > 0xdfff) {
    at_ = second; // a character of its own
    return code;
  }
  return 0x10000 + ((code - 0xd800) << 10 | (low - 0xdc00));
}

uint32_t JsonReader::four_digits() {
  uint32_t code = 0;
  for (int i = 0; i < 4; ++i) {
    const char c = at_ < text_.size() ? text_[at_++] : '\0';
    const char lower = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
    if (!is_digit(c) && (lower < 'a' || lower > 'f')) {
      fail("an escape in a string lacks its four digits");
    }
    code = code << 4 | static_cast<uint32_t>(is_digit(c) ? c - '0' : lower - 'a' + 10);
  }
  return code;
}

std::optional<uint64_t> JsonReader::size() {
  const char first = peek();
  if (!is_digit(first) && first != '-') {
    skip();
    return std::nullopt;
  }
  std::string_view digits = number();
  if (digits == "-0") {
    return 0;
  }
  uint64_t value = 0;
  for (const char c : digits) {
    const uint64_t digit = static_cast<uint64_t>(c - '0');
    if (!is_digit(c) || value > (uint64_t{std::numeric_limits<int64_t>::max()} - digit) / 10) {
      return std::nullopt;
    }
    value = value * 10 + digit;
  }
  return value;
}

std::optional<double> JsonReader::real() {
  const char first = peek();
  if (!is_digit(first) && first != '-') {
    skip();
    return std::nullopt;
  }
  std::istringstream stream{std::string(number())};
  stream.imbue(std::locale::classic());
  double value = 0;
  return stream >> value ? std::optional<double>(value) : std::nullopt; // -Infinity, or too large
}

std::string JsonReader::integer() {
  const char first = peek();
  if (!is_digit(first) && first != '-') {
    fail("an integer is missing");
  }
  const std::string_view text = number();
  if (text.find_first_not_of("-0123456789") != std::string_view::npos) {
    fail("a number is not an integer");
  }
  return std::string(text);
}

/// The text of a number.
std::string_view JsonReader::number() {
  const size_t start = at_;
  if (take_word("-Infinity")) {
    return text_.substr(start, at_ - start);
  }
  const auto digits = [&] {
    const size_t from = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) {
      ++at_;
    }
    if (at_ == from) {
      fail("a number lacks digits");
    }
    return at_ - from;
  };
  const auto has = [&](std::string_view any) {
    return at_ < text_.size() && any.find(text_[at_]) != std::string_view::npos;
  };
  at_ += has("-") ? 1 : 0;
  const bool zero = has("0");
  const size_t whole = zero ? (++at_, 1) : digits();
  bool integer = true;
  if (has(".")) {
    integer = false;
    ++at_;
    digits();
  }
  if (has("eE")) {
    integer = false;
    ++at_;
    at_ += has("+-") ? 1 : 0;
    digits();
  }
  if (integer && whole > kMostDigits) {
    fail(format("an integer has {} digits", whole));
  }
  return text_.substr(start, at_ - start);
}

std::string_view JsonReader::skip() {
  const char first = peek();
  const size_t start = at_;
  if (first == '{') {
    object([this](const std::string&) { skip(); });
  } else if (first == '[') {
    array([this] { skip(); });
  } else if (first == '"') {
    string();
  } else if (first == '-' || is_digit(first)) {
    number();
  } else if (
      !take_word("true") && !take_word("false") && !take_word("null") && !take_word("NaN") && !take_word("Infinity")) {
    fail("a value is missing");
  }
  return text_.substr(start, at_ - start);
}

bool JsonReader::take_literal(std::string_view word) {
  peek();
  return take_word(word);
}

void JsonReader::end() {
  peek();
  if (at_ != text_.size()) {
    fail("something follows the value");
  }
}

/// The next character that is not white space; NUL at the end, which no value begins with.
char JsonReader::peek() {
  at_ = std::min(text_.find_first_not_of(" \t\n\r", at_), text_.size());
  return at_ < text_.size() ? text_[at_] : '\0';
}

bool JsonReader::take(char wanted) {
  const bool found = peek() == wanted;
  at_ += found ? 1 : 0;
  return found;
}

void JsonReader::expect(char wanted) {
  if (!take(wanted)) {
    fail(format("'{}' is missing", std::string_view(&wanted, 1)));
  }
}

bool JsonReader::take_word(std::string_view word) {
  const bool found = text_.substr(at_, word.size()) == word;
  at_ += found ? word.size() : 0;
  return found;
}

void JsonReader::fail(const std::string& reason) const {
  throw_format_error("{} is not JSON: at character {}, {}", what_, at_, reason);
}

} // namespace blobstore::internal
