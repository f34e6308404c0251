#include "logical/similar_names.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "format/records.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr size_t kMostCompared = 5000; // comparing texts takes microseconds each
constexpr size_t kMostNear = 3;
constexpr double kNear = 0.75;

using Characters = std::u32string;

/// The characters of UTF-8.
Characters characters(std::string_view text) {
  Characters out;
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const size_t length = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    char32_t one = length == 1 ? first : first & (0xff >> (length + 1));
    for (size_t k = 1; k < length && i + k < text.size(); ++k) {
      one = one << 6 | (static_cast<unsigned char>(text[i + k]) & 0x3f);
    }
    out += one;
    i += length;
  }
  return out;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return out;
}

bool ends_with_module(std::string_view name, std::string_view end) {
  return name.size() > end.size() && name[name.size() - end.size() - 1] == '.' &&
      name.substr(name.size() - end.size()) == end;
}

/// Whether two names are equal, or differ in the modules in front.
bool differ_in_front(std::string_view one, std::string_view other) {
  return one == other || ends_with_module(one, other) || ends_with_module(other, one);
}

/// A text that others are compared with.
class Compared {
 public:
  explicit Compared(std::string_view text) : text_(characters(text)) {
    for (size_t i = 0; i < text_.size(); ++i) {
      places_[text_[i]].push_back(i);
      ++counts_[text_[i]];
    }
    if (text_.size() >= 200) { // then frequent characters do not begin a match
      const size_t most = text_.size() / 100 + 1;
      for (auto place = places_.begin(); place != places_.end();) {
        place = place->second.size() > most ? places_.erase(place) : std::next(place);
      }
    }
  }

  double ratio(const Characters& other) const { return of(matching(other), other); }

  /// Two limits of `ratio` that take less time.
  double limit(const Characters& other) const { return of(std::min(text_.size(), other.size()), other); }
  double tighter_limit(const Characters& other) const {
    std::unordered_map<char32_t, size_t> left = counts_;
    size_t common = 0;
    for (const char32_t one : other) {
      size_t& count = left[one];
      if (count > 0) {
        --count;
        ++common;
      }
    }
    return of(common, other);
  }

 private:
  double of(size_t common, const Characters& other) const {
    const size_t length = text_.size() + other.size();
    return length == 0 ? 1.0 : 2.0 * static_cast<double>(common) / static_cast<double>(length);
  }

  struct Match {
    size_t other;
    size_t own;
    size_t size;
  };

  /// The longest run that both have in these parts; of several the first in `other`, and then in the own text.
  Match longest(const Characters& other, size_t begin, size_t end, size_t own_begin, size_t own_end) const {
    Match best{begin, own_begin, 0};
    std::unordered_map<size_t, size_t> ending; // length of the run that ends at a place of the own text
    for (size_t i = begin; i < end; ++i) {
      std::unordered_map<size_t, size_t> next;
      const auto places = places_.find(other[i]);
      if (places != places_.end()) {
        for (const size_t j : places->second) {
          if (j < own_begin) {
            continue;
          }
          if (j >= own_end) {
            break;
          }
          const auto before = j == 0 ? ending.end() : ending.find(j - 1);
          const size_t length = next[j] = (before == ending.end() ? 0 : before->second) + 1;
          if (length > best.size) {
            best = {i + 1 - length, j + 1 - length, length};
          }
        }
      }
      ending = std::move(next);
    }
    while (best.other > begin && best.own > own_begin && other[best.other - 1] == text_[best.own - 1]) {
      best = {best.other - 1, best.own - 1, best.size + 1};
    }
    while (best.other + best.size < end && best.own + best.size < own_end &&
           other[best.other + best.size] == text_[best.own + best.size]) {
      ++best.size;
    }
    return best;
  }

  /// The number of characters in runs that both have, in the same order.
  size_t matching(const Characters& other) const {
    struct Part {
      size_t begin, end, own_begin, own_end;
    };
    size_t total = 0;
    std::vector<Part> parts{{0, other.size(), 0, text_.size()}};
    while (!parts.empty()) {
      const Part part = parts.back();
      parts.pop_back();
      const Match match = longest(other, part.begin, part.end, part.own_begin, part.own_end);
      if (match.size == 0) {
        continue;
      }
      total += match.size;
      if (part.begin < match.other && part.own_begin < match.own) {
        parts.push_back({part.begin, match.other, part.own_begin, match.own});
      }
      if (match.other + match.size < part.end && match.own + match.size < part.own_end) {
        parts.push_back({match.other + match.size, part.end, match.own + match.size, part.own_end});
      }
    }
    return total;
  }

  Characters text_;
  std::unordered_map<char32_t, std::vector<size_t>> places_;
  std::unordered_map<char32_t, size_t> counts_;
};

bool is_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

} // namespace

std::string quoted(const Names& names, size_t most) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < most; ++i) {
    text += format("{}{}'", i == 0 ? "'" : ", '", names[i]);
  }
  return names.size() <= most ? text : format("{} and {} others", text, names.size() - most);
}

std::string some(const Names& names, const char* last) {
  if (names.size() != 2) {
    return quoted(names, 5);
  }
  return format("'{}' {} '{}'", names[0], last, names[1]);
}

Names near(std::string_view name, const Names& known) {
  Names found;
  if (name.empty()) {
    return found;
  }
  const std::string plain = lower(name);
  for (const std::string_view key : known) {
    if (key != name && differ_in_front(lower(key), plain) && found.size() < kMostNear) {
      found.push_back(key);
    }
  }
  if (!found.empty() || known.size() > kMostCompared) {
    return found;
  }
  const Compared compared(name);
  std::vector<std::pair<double, std::string_view>> similar;
  for (const std::string_view key : known) {
    const Characters text = characters(key);
    if (compared.limit(text) >= kNear && compared.tighter_limit(text) >= kNear) {
      if (const double ratio = compared.ratio(text); ratio >= kNear) {
        similar.emplace_back(ratio, key);
      }
    }
  }
  std::sort(similar.rbegin(), similar.rend());
  for (size_t i = 0; i < similar.size() && i < kMostNear; ++i) {
    found.push_back(similar[i].second);
  }
  return found;
}

std::string suggest(std::string_view name, const Names& known) {
  std::string text;
  for (const std::string_view found : near(name, known)) {
    text += format("{}{}'", text.empty() ? "; did you mean '" : " or '", found);
  }
  if (!text.empty()) {
    return text + "?";
  }
  bool named = false;
  for (const std::string_view key : known) {
    if (key.rfind(kOwnKeyPrefix, 0) != 0) {
      if (!is_content_key(key)) {
        return "";
      }
      named = true;
    }
  }
  return named ? "; the keys of this file are contents, not names: deduplicate the programs with "
                 "`blobstore dedup --names model.safetensors` to have the names of a checkpoint"
               : "";
}

bool is_content_key(std::string_view key) {
  constexpr std::string_view kFront = "tensor.";
  return key.size() > kFront.size() + 32 && key.substr(0, kFront.size()) == kFront &&
      is_hex(key.substr(kFront.size(), 32)) && key[kFront.size() + 32] == '.';
}

bool is_hash_key(std::string_view key) {
  constexpr std::string_view kFront = "scale_";
  if (key.substr(0, kFront.size()) == kFront) {
    key.remove_prefix(kFront.size());
  }
  return key.size() == 64 && is_hex(key);
}

double similarity(std::string_view one, std::string_view other) {
  return Compared(other).ratio(characters(one));
}

} // namespace blobstore::internal
