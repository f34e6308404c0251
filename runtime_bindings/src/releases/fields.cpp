#include "releases/fields.h"

#include <algorithm>
#include <optional>
#include <vector>

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

void Fields::object(const char* what, std::string_view required, const std::function<bool(const std::string&)>& field) {
  if (!json.at_object()) {
    throw_format_error("{} is not an object", what);
  }
  std::vector<std::string> seen;
  json.object([&](const std::string& key) {
    if (field(key)) {
      seen.push_back(key);
    } else {
      json.skip();
    }
  });
  for (size_t end = required.find(' '); end != std::string_view::npos; end = required.find(' ')) {
    if (std::find(seen.begin(), seen.end(), required.substr(0, end)) == seen.end()) {
      throw_format_error("{} lacks '{}'", what, required.substr(0, end));
    }
    required.remove_prefix(end + 1);
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

void Fields::tuple(const char* what, size_t least, size_t most, const std::function<void(size_t)>& item) {
  if (array(what, most, item) < least) {
    throw_format_error("{} has fewer than {} items", what, least);
  }
}

ReleaseObject Fields::content(const char* what) {
  ReleaseObject found;
  tuple(what, 2, kAnyNumber, [&](size_t position) {
    if (position == 0) {
      found.sha256 = text("a SHA-256", is_sha256);
    } else if (position == 1) {
      found.size = number("a size");
    } else if (position == 2) {
      found.packed = text("the folder of an object", [](std::string_view folder) {
                       return folder == "files" || folder == "packs";
                     }) == "packs";
    } else {
      json.skip();
    }
  });
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
