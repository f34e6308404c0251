#include "adapters/lora_names.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "adapters/peft_folder.h"
#include "logical/numbers.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr const char* kWrappers[] = {"", "linear.", "base.", "base_layer."}; // between a module and its weight

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

/// A name in lower case, with an underscore for all but ASCII letters and digits. The two characters whose lower case
/// begins with an ASCII letter are the Kelvin sign and the dotted capital I.
std::string node_form(std::string_view name) {
  std::string form;
  form.reserve(name.size());
  for (size_t i = 0; i < name.size(); ++i) {
    const char c = lower(name[i]);
    const std::string_view rest = name.substr(i);
    if (rest.substr(0, 3) == "\u212a") {
      form += 'k';
      i += 2;
    } else if (rest.substr(0, 2) == "\u0130") {
      form += "i_";
      i += 1;
    } else {
      form += (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ? c : '_';
    }
  }
  return form;
}

/// A name that ends in, or contains between dots, `lora_a` or `lora_b`.
struct Half {
  std::string module;
  std::string rest;
  char which = 'a';
};

std::optional<Half> half_of(std::string_view name) {
  if (name.find('\n') != std::string_view::npos) {
    return std::nullopt;
  }
  for (size_t end = name.size();;) { // the last such part counts
    const size_t dot = end == 0 ? std::string_view::npos : name.rfind('.', end - 1);
    const size_t start = dot == std::string_view::npos ? 0 : dot + 1;
    std::string part(name.substr(start, end - start));
    std::transform(part.begin(), part.end(), part.begin(), lower);
    if (part == "lora_a" || part == "lora_b") {
      return Half{std::string(name.substr(0, start == 0 ? 0 : start - 1)), std::string(name.substr(end)), part.back()};
    }
    if (dot == std::string_view::npos) {
      return std::nullopt;
    }
    end = dot;
  }
}

/// Why two tensors cannot be multiplied; empty if they can.
std::string no_product(const NameAndSizes& a, const NameAndSizes& b) {
  const std::string a_text = format("'{}' {}", a.first, to_string(a.second));
  const std::string b_text = format("'{}' {}", b.first, to_string(b.second));
  if (a.second.size() != 2 || b.second.size() != 2) {
    return format("{} and {} must both be matrices", a_text, b_text);
  }
  if (a.second[0] != b.second[1]) {
    return format("{} has rank {}, {} rank {}", a_text, a.second[0], b_text, b.second[1]);
  }
  return "";
}

} // namespace

bool is_lora(std::string_view name) {
  const std::string form = node_form(name);
  for (size_t at = form.find("lora_"); at != std::string::npos; at = form.find("lora_", at + 1)) {
    const size_t half = at + 5;
    const bool begins = at == 0 || form[at - 1] == '_';
    const bool ends = half + 1 == form.size() || (half + 1 < form.size() && form[half + 1] == '_');
    if (begins && ends && (form[half] == 'a' || form[half] == 'b')) {
      return true;
    }
  }
  return false;
}

FoundPairs find_pairs(const std::vector<NameAndSizes>& tensors, const std::string& origin) {
  std::map<std::pair<std::string, std::string>, std::map<char, const NameAndSizes*>> halves;
  for (const NameAndSizes& tensor : tensors) {
    if (const auto half = half_of(tensor.first)) {
      halves[{half->module, half->rest}][half->which] = &tensor;
    }
  }
  FoundPairs found;
  std::map<std::string, std::string> seen; // modules, and the `a` of their pairs
  for (const auto& [place, both] : halves) {
    if (both.size() == 1) {
      const auto& [which, only] = *both.begin();
      found.problems.emplace_back(
          ErrorKind::Adapter,
          origin,
          format("'{}' has no {} beside it", only->first, which == 'a' ? "lora_b" : "lora_a"));
      continue;
    }
    const auto& [a_name, a] = *both.at('a');
    const auto& [b_name, b] = *both.at('b');
    if (std::string reason = no_product(*both.at('a'), *both.at('b')); !reason.empty()) {
      found.problems.emplace_back(ErrorKind::Layout, origin, std::move(reason));
    } else if (const auto known = seen.find(place.first); known != seen.end()) {
      found.problems.emplace_back(
          ErrorKind::Adapter,
          origin,
          format("module '{}' has two pairs, by '{}' and '{}'", place.first, known->second, a_name));
    } else {
      seen.emplace(place.first, a_name);
      found.pairs.push_back({place.first, a_name, b_name, a[0], a[1], b[0]});
    }
  }
  return found;
}

Error no_adapter(const std::string& origin) {
  return Error(ErrorKind::Adapter, origin, "not an adapter: no tensor has a part lora_a or lora_b in its name");
}

std::vector<std::string> weight_names(const std::string& module) {
  std::vector<std::string> modules{module};
  if (module.compare(0, kPeftPrefix.size(), kPeftPrefix) == 0) {
    modules.push_back(module.substr(kPeftPrefix.size()));
  }
  std::vector<std::string> names;
  for (const std::string& one : modules) {
    for (const char* part : kWrappers) {
      names.push_back(format("{}{}weight", one.empty() ? "" : one + ".", part));
    }
  }
  return names;
}

std::vector<std::string> modules_of_weight(const std::string& name) {
  std::vector<std::string> modules;
  for (const char* part : kWrappers) {
    if (const std::string end = format(".{}weight", part); ends_with(name, end)) {
      modules.push_back(name.substr(0, name.size() - end.size()));
    }
  }
  return modules;
}

std::string quoted_names(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return in_quotes(names);
}

} // namespace blobstore::internal
