#include "os/mapped_files.h"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "os/system_text.h"

namespace blobstore::internal {
namespace {

/// A line of /proc/self/maps.
struct Line {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t offset = 0;
  uint64_t inode = 0;
  std::string_view permissions;
  std::string_view device;
  std::string_view path;
};

/// Take what comes before a character from a text, and the character.
std::string_view take(std::string_view& text, char before) {
  const std::string_view field = text.substr(0, text.find(before));
  text.remove_prefix(std::min(field.size() + 1, text.size()));
  return field;
}

uint64_t number(std::string_view digits, int base) {
  uint64_t value = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  return value;
}

Line parse(std::string_view text) {
  Line line;
  line.begin = number(take(text, '-'), 16);
  line.end = number(take(text, ' '), 16);
  line.permissions = take(text, ' ');
  line.offset = number(take(text, ' '), 16);
  line.device = take(text, ' ');
  line.inode = number(take(text, ' '), 10);
  line.path = text.substr(std::min(text.find_first_not_of(' '), text.size()));
  return line;
}

/// Call a function for each map of a file. Without /proc, no map is known.
template <typename Function>
void for_each_map(Function function) {
  const std::string maps = system_text("/proc/self/maps");
  for (std::string_view rest = maps; !rest.empty();) {
    const Line line = parse(take(rest, '\n'));
    if (line.inode != 0) {
      function(line);
    }
  }
}

} // namespace

std::vector<uint8_t*> shared_maps_of(const File& file) {
  const FileStatus status = file.status();
  std::vector<uint8_t*> found;
  for_each_map([&](const Line& line) {
    if (line.inode == status.inode && line.offset == 0 && !line.permissions.empty() && line.permissions.back() == 's') {
      found.push_back(reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(line.begin)));
    }
  });
  return found;
}

std::vector<std::optional<MappedFile>> mapped_files(const std::vector<const void*>& addresses) {
  std::vector<std::optional<MappedFile>> found(addresses.size());
  for_each_map([&](const Line& line) {
    for (size_t i = 0; i < addresses.size(); ++i) {
      const auto at = reinterpret_cast<uintptr_t>(addresses[i]);
      if (at >= line.begin && at < line.end) {
        found[i] = MappedFile{std::string(line.device), line.inode, std::string(line.path)};
      }
    }
  });
  return found;
}

} // namespace blobstore::internal
