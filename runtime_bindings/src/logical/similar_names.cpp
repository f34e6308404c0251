#include "logical/similar_names.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "format/constants.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr size_t kMostCompared = 5000; // comparing texts takes microseconds each
constexpr size_t kMostNear = 3;
constexpr size_t kShareOfTypos = 4; // one in so many characters

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

/// How many characters must be inserted, removed, replaced or swapped with their neighbours to make one text of the
/// other: the optimal string alignment distance. In bytes of UTF-8.
size_t distance(std::string_view one, std::string_view other) {
  std::vector<size_t> before;
  std::vector<size_t> above(other.size() + 1);
  std::iota(above.begin(), above.end(), size_t{0});
  for (size_t i = 0; i < one.size(); ++i) {
    std::vector<size_t> row{i + 1};
    for (size_t j = 0; j < other.size(); ++j) {
      const size_t replaced = above[j] + (one[i] == other[j] ? 0 : 1);
      row.push_back(std::min({row[j] + 1, above[j + 1] + 1, replaced}));
      if (i > 0 && j > 0 && one[i] == other[j - 1] && one[i - 1] == other[j]) {
        row.back() = std::min(row.back(), before[j - 1] + 1);
      }
    }
    before = std::move(above);
    above = std::move(row);
  }
  return above.back();
}

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
  Names nearest; // each once: several files may have one
  if (name.empty()) {
    return nearest;
  }
  const std::string plain = lower(name);
  for (const std::string_view key : known) {
    if (key != name && nearest.size() < kMostNear && differ_in_front(lower(key), plain) &&
        std::find(nearest.begin(), nearest.end(), key) == nearest.end()) {
      nearest.push_back(key);
    }
  }
  if (!nearest.empty() || known.size() > kMostCompared) {
    return nearest;
  }
  std::vector<std::pair<size_t, std::string_view>> similar;
  for (const std::string_view key : known) {
    const size_t most = std::max(name.size(), key.size()) / kShareOfTypos;
    if (std::max(name.size(), key.size()) - std::min(name.size(), key.size()) <= most) {
      if (const size_t typos = distance(name, key); typos <= most) {
        similar.emplace_back(typos, key);
      }
    }
  }
  std::sort(similar.begin(), similar.end());
  similar.erase(std::unique(similar.begin(), similar.end()), similar.end());
  for (size_t i = 0; i < similar.size() && i < kMostNear; ++i) {
    nearest.push_back(similar[i].second);
  }
  return nearest;
}

std::string suggest(std::string_view name, const Names& known) {
  std::string text;
  for (const std::string_view key : near(name, known)) {
    text += format("{}{}'", text.empty() ? "; did you mean '" : " or '", key);
  }
  if (!text.empty()) {
    return text + "?";
  }
  bool named = false;
  for (const std::string_view key : known) {
    if (key.rfind(kKeyPrefix, 0) != 0) {
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

} // namespace blobstore::internal
