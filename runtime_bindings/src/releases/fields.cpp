#include "releases/fields.h"

#include <optional>

namespace blobstore::internal {

std::string Fields::text(const char* what, Check check) {
  if (!json.at_string()) {
    throw_format_error("{} is not a string", what);
  }
  std::string found = json.string();
  if (!check(found)) {
    throw_format_error("'{}' cannot be {}", found, what);
  }
  return found;
}

uint64_t Fields::number(const char* what, uint64_t least, uint64_t most) {
  const std::optional<uint64_t> found = json.size();
  if (!found || *found < least || *found > most) {
    throw_format_error("{} is not an integer from {} to {}", what, least, most);
  }
  return *found;
}

void Fields::object(const char* what, const std::vector<Field>& fields) {
  if (!json.at_object()) {
    throw_format_error("{} is not an object", what);
  }
  std::vector<bool> seen(fields.size());
  json.object([&](const std::string& key) {
    size_t at = 0;
    while (at < fields.size() && key != fields[at].name) {
      ++at;
    }
    if (at == fields.size()) {
      json.skip();
    } else {
      fields[at].read();
      seen[at] = true;
    }
  });
  for (size_t at = 0; at < fields.size(); ++at) {
    if (fields[at].required && !seen[at]) {
      throw_format_error("{} lacks '{}'", what, fields[at].name);
    }
  }
}

size_t Fields::array(const char* what, size_t most, const std::function<void(size_t)>& item) {
  if (!json.at_array()) {
    throw_format_error("{} is not an array", what);
  }
  size_t count = 0;
  json.array([&] {
    if (count == most) {
      throw_format_error("{} has more than {} items", what, most);
    }
    item(count++);
  });
  return count;
}

ReleaseObject Fields::content(const char* what) {
  ReleaseObject found;
  const auto is_folder = [](std::string_view folder) { return folder == "files" || folder == "packs"; };
  tuple(
      what,
      2,
      kAnyNumber,
      [&] { found.sha256 = text("a SHA-256", is_sha256); },
      [&] { found.size = number("a size"); },
      [&] { found.packed = text("the folder of an object", is_folder) == "packs"; });
  return found;
}

bool Fields::flag(const char* what) {
  const bool found = json.take_literal("true");
  if (!found && !json.take_literal("false")) {
    throw_format_error("{} is neither true nor false", what);
  }
  return found;
}

void Fields::format_is(const char* wanted) {
  if (!json.at_string() || json.string() != wanted) {
    throw_format_error("its format is not '{}'", wanted);
  }
}

} // namespace blobstore::internal
