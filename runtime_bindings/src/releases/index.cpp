#include "releases/index.h"

#include <algorithm>
#include <functional>
#include <limits>

#include <blobstore/error.h>

#include "format/constants.h"
#include "format/json.h"
#include "format/utf8.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr uint64_t kMostNumber = (uint64_t{1} << 53) - 1; // what every reader of JSON reads exactly
constexpr size_t kMostOfSet = 10'000;
constexpr size_t kMostObjects = 1'000;
constexpr size_t kMostWays = 4;
constexpr size_t kMostName = 1024; // characters
constexpr size_t kMostPartOfName = 255; // bytes
constexpr size_t kMostFolders = 32;
constexpr size_t kMostNumbers = 4; // of a version
constexpr std::string_view kDigits = "0123456789";
constexpr std::string_view kHexadecimal = "0123456789abcdef";

using Check = bool (*)(std::string_view);

bool is_name(std::string_view text) {
  constexpr std::string_view kFirst = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
  return !text.empty() && text.size() <= 100 && kFirst.find(text[0]) != std::string_view::npos &&
      std::all_of(text.begin(), text.end(), [&](char c) {
        return kFirst.find(c) != std::string_view::npos || std::string_view("._+-").find(c) != std::string_view::npos;
      });
}

/// The numbers of a version; empty for other text.
std::vector<unsigned> numbers_of(std::string_view version) {
  std::vector<unsigned> numbers;
  while (true) {
    const size_t end = std::min(version.find('.'), version.size());
    const std::string_view digits = version.substr(0, end);
    if (digits.empty() || digits.size() > 4 || digits.find_first_not_of(kDigits) != std::string_view::npos ||
        numbers.size() == kMostNumbers) {
      return {};
    }
    numbers.push_back(0);
    for (const char digit : digits) {
      numbers.back() = numbers.back() * 10 + static_cast<unsigned>(digit - '0');
    }
    if (end == version.size()) {
      return numbers;
    }
    version.remove_prefix(end + 1);
  }
}

bool is_version(std::string_view text) {
  return !numbers_of(text).empty();
}

bool is_kind(std::string_view text) {
  return text == "program" || text == "data" || text == "other";
}

bool is_encoding(std::string_view text) {
  constexpr std::string_view kAll[] = {
      "zstd", "copy", "planes:2", "planes:4", "planes:8", "patch:1", "patch:2", "patch:4", "patch:8"};
  return std::find(std::begin(kAll), std::end(kAll), text) != std::end(kAll);
}

size_t characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xc0) != 0x80; }));
}

/// The name of a file or a data set.
bool is_text(std::string_view text) {
  return !text.empty() && is_utf8(text) && characters(text) <= kMostName;
}

/// What Python's str.strip removes outside ASCII, and in ASCII but for control characters, which are refused anyway.
bool is_space_at(std::string_view text, bool front) {
  constexpr std::string_view kSpaces[] = {" ",      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002",
                                          "\u2003", "\u2004", "\u2005", "\u2006", "\u2007", "\u2008", "\u2009",
                                          "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  return std::any_of(std::begin(kSpaces), std::end(kSpaces), [&](std::string_view space) {
    return front ? text.substr(0, space.size()) == space : ends_with(text, space);
  });
}

/// Whether a name leads into a folder, on every system.
bool leads_inside(std::string_view name) {
  constexpr std::string_view kForbidden = "\\:\x7f*?\"<>|";
  const bool bad = std::any_of(name.begin(), name.end(), [&](char c) {
    return static_cast<uint8_t>(c) < 32 || kForbidden.find(c) != std::string_view::npos;
  });
  for (size_t folders = 1; !bad; ++folders) {
    const size_t end = std::min(name.find('/'), name.size());
    const std::string_view part = name.substr(0, end);
    if (part.empty() || part.back() == '.' || part.substr(0, 11) == ".blobstore-" || is_space_at(part, true) ||
        is_space_at(part, false) || part.size() > kMostPartOfName || folders > kMostFolders) {
      return false;
    }
    if (end == name.size()) {
      return true;
    }
    name.remove_prefix(end + 1);
  }
  return false;
}

/// As file systems compare names that ignore case. For other letters than ASCII's, the file system itself decides when
/// the names are made.
std::string folded(std::string_view name) {
  std::string text(name);
  for (char& c : text) {
    c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  }
  return text;
}

/// The fields of JSON objects, which are checked as they are read.
class Fields {
 public:
  explicit Fields(std::string_view text) : json(text, "it") {}

  std::string text(const char* what, Check check) {
    if (!json.at_string()) {
      throw_format_error("{} is not a string", what);
    }
    std::string found = json.string();
    if (!check(found)) {
      throw_format_error("'{}' cannot be {}", found, what);
    }
    return found;
  }

  uint64_t number(const char* what, uint64_t least = 0) {
    const std::optional<uint64_t> found = json.size();
    if (!found || *found < least || *found > kMostNumber) {
      throw_format_error("{} is not an integer from {} to 2**53 - 1", what, least);
    }
    return *found;
  }

  /// @param field reads the value of a field, or returns false if it does not know it.
  /// @param required those that must be there, each with a space behind it.
  void object(const char* what, std::string_view required, const std::function<bool(const std::string&)>& field) {
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

  /// @param item reads the item of this position.
  void array(const char* what, size_t most, const std::function<void(size_t)>& item) {
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
    last_count = count;
  }

  /// An array whose items have a meaning each; what follows them is skipped.
  void tuple(const char* what, size_t least, bool more, const std::function<void(size_t)>& item) {
    array(what, more ? std::numeric_limits<size_t>::max() : least, item);
    if (last_count < least) {
      throw_format_error("{} has fewer than {} items", what, least);
    }
  }

  /// An object of a release.
  ReleaseObject content(const char* what) {
    ReleaseObject found;
    object(what, "sha256 size ", [&](const std::string& key) { return content_field(key, found); });
    return found;
  }

  bool content_field(const std::string& key, ReleaseObject& found) {
    if (key == "sha256") {
      found.sha256 = text("a SHA-256", is_sha256);
    } else if (key == "size") {
      found.size = number("a size");
    } else {
      return false;
    }
    return true;
  }

  void flag(const char* what) {
    if (!json.take_literal("true") && !json.take_literal("false")) {
      throw_format_error("{} is neither true nor false", what);
    }
  }

  JsonReader json;
  size_t last_count = 0;
};

/// What an index says of data sets, programs and packs, until all files are known.
struct Named {
  std::vector<std::pair<std::string, std::vector<std::string>>> sets;
  std::vector<std::pair<std::string, std::vector<std::string>>> programs;
  std::vector<std::pair<ReleaseObject, std::vector<std::pair<std::string, uint64_t>>>> packs;
};

void read_format(Fields& fields, const char* wanted) {
  if (!fields.json.at_string() || fields.json.string() != wanted) {
    throw_format_error("its format is not '{}'", wanted);
  }
}

ReleaseFile read_file(Fields& fields) {
  ReleaseFile file;
  bool travels = false;
  fields.object("a file", "name kind sha256 size ", [&](const std::string& key) {
    if (key == "name") {
      file.name = fields.text("the name of a file", is_text);
    } else if (key == "kind") {
      file.kind = fields.text("the kind of a file", is_kind);
    } else if (key == "table") {
      if (!fields.json.take_literal("null")) {
        file.table = fields.content("a table");
      }
    } else if (key == "travels") {
      fields.number("the size of another form");
      travels = true;
    } else {
      return fields.content_field(key, file.object);
    }
    return true;
  });
  if (!leads_inside(file.name)) {
    throw_format_error(
        "'{}' cannot be the name of a file of a release: expected a plain path that leads into a folder", file.name);
  }
  if (travels && !file.table) {
    throw_format_error("'{}' has another form but no table", file.name);
  }
  if (file.table && file.table->size > kTableLimit) {
    throw_format_error(
        "the table of '{}' has {} bytes, at most {} are possible", file.name, file.table->size, kTableLimit);
  }
  return file;
}

std::vector<std::string> read_names(Fields& fields, size_t least, size_t most) {
  std::vector<std::string> names;
  fields.array("a list of names", most, [&](size_t) { names.push_back(fields.text("a name", is_text)); });
  if (names.size() < least) {
    throw_format_error("a data set has no files");
  }
  return names;
}

void read_sets(Fields& fields, Named& named) {
  fields.array("the list of data sets", kMostFiles, [&](size_t) {
    auto& set = named.sets.emplace_back();
    fields.object("a data set", "name files ", [&](const std::string& key) {
      if (key == "name") {
        set.first = fields.text("the name of a data set", is_text);
      } else if (key == "files") {
        set.second = read_names(fields, 1, kMostOfSet);
      } else if (key == "adapter") {
        fields.flag("adapter");
      } else {
        return false;
      }
      return true;
    });
  });
}

void read_programs(Fields& fields, Named& named) {
  fields.array("the list of programs", kMostFiles, [&](size_t) {
    auto& program = named.programs.emplace_back();
    fields.object("a program", "name ", [&](const std::string& key) {
      if (key == "name") {
        program.first = fields.text("the name of a program", is_text);
      } else if (key == "data") {
        program.second = read_names(fields, 0, kMostFiles);
      } else {
        return false;
      }
      return true;
    });
  });
}

void read_packs(Fields& fields, Named& named) {
  fields.array("the list of packs", kMostFiles, [&](size_t) {
    auto& pack = named.packs.emplace_back();
    fields.object("a pack", "sha256 size files ", [&](const std::string& key) {
      if (key != "files") {
        return fields.content_field(key, pack.first);
      }
      fields.array("the files of a pack", kMostFiles, [&](size_t) {
        auto& place = pack.second.emplace_back();
        fields.tuple("a file of a pack", 2, false, [&](size_t position) {
          if (position == 0) {
            place.first = fields.text("the name of a file", is_text);
          } else {
            place.second = fields.number("a place in a pack");
          }
        });
      });
      return true;
    });
  });
}

/// Two names that are one on some file systems, and files that would be folders.
void check_names(const std::vector<ReleaseFile>& files) {
  std::vector<std::string> names;
  for (const ReleaseFile& file : files) {
    names.push_back(folded(file.name));
  }
  Positions seen;
  for (size_t i = 0; i < names.size(); ++i) {
    if (const size_t known = seen.emplace(names[i], i).first->second; known != i) {
      throw_format_error("the file names '{}' and '{}' are one on some file systems", files[known].name, files[i].name);
    }
  }
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string_view name = names[i];
    for (size_t end = name.rfind('/'); end != std::string_view::npos && end > 0; end = name.rfind('/', end - 1)) {
      if (const auto parent = seen.find(name.substr(0, end)); parent != seen.end()) {
        throw_format_error("'{}' is a file, and the folder of '{}'", files[parent->second].name, files[i].name);
      }
    }
  }
}

void check_sizes(const std::vector<ReleaseFile>& files) {
  Positions digests;
  for (size_t i = 0; i < files.size(); ++i) {
    const size_t first = digests.emplace(files[i].object.sha256, i).first->second;
    if (files[first].object.size != files[i].object.size) {
      throw_format_error("two files have one digest and different sizes");
    }
  }
}

void check_sets(const ReleaseIndex& index, const Positions& files, const Named& named) {
  const auto is_of_kind = [&](const std::string& name, const char* kind) {
    const auto found = files.find(name);
    return found != files.end() && index.files[found->second].kind == kind;
  };
  Positions sets;
  Positions placed;
  for (const auto& [set, names] : named.sets) {
    if (!sets.emplace(set, 0).second) {
      throw_format_error("data set '{}' occurs twice", set);
    }
    if (!leads_inside(set)) { // merged, it is a file of this name
      throw_format_error("'{}' cannot be the name of a data set: expected a plain path that leads into a folder", set);
    }
    if (files.count(set) > 0 && std::find(names.begin(), names.end(), set) == names.end()) {
      throw_format_error("data set '{}' has the name of a file that it does not list", set);
    }
    for (const std::string& name : names) {
      if (!is_of_kind(name, "data")) {
        throw_format_error("data set '{}' lists '{}', which is no data file of the release", set, name);
      }
      if (!placed.emplace(name, 0).second) {
        throw_format_error("the data file '{}' is in two data sets, or twice in one", name);
      }
    }
  }
  for (const auto& [program, names] : named.programs) {
    if (!is_of_kind(program, "program")) {
      throw_format_error("'{}' is listed as a program, but no file of a program has this name", program);
    }
    for (const std::string& name : names) {
      if (sets.count(name) == 0) {
        throw_format_error("program '{}' takes data set '{}', which is not there", program, name);
      }
    }
  }
}

ReleaseIndex parse_index(const std::string& bytes) {
  ReleaseIndex index;
  Named named;
  Fields fields(bytes);
  constexpr std::string_view kRequired = "format name version published executorch files ";
  fields.object("the index", kRequired, [&](const std::string& key) {
    if (key == "format") {
      read_format(fields, "blobstore.release.1");
    } else if (key == "name") {
      index.name = fields.text("the name of a release", is_name);
    } else if (key == "version") {
      index.version = fields.text("the version of a release", is_name);
    } else if (key == "published") {
      index.published = fields.number("the time of publishing");
    } else if (key == "executorch") {
      index.executorch = fields.text("a version of ExecuTorch", is_version);
    } else if (key == "files") {
      fields.array("the list of files", kMostFiles, [&](size_t) { index.files.push_back(read_file(fields)); });
    } else if (key == "base") {
      if (!fields.json.take_literal("null")) {
        fields.text("the version of the base", is_name);
      }
    } else if (key == "data") {
      read_sets(fields, named);
    } else if (key == "programs") {
      read_programs(fields, named);
    } else if (key == "packs") {
      read_packs(fields, named);
    } else {
      return false;
    }
    return true;
  });
  fields.json.end();
  check_names(index.files);
  check_sizes(index.files);
  Positions files;
  for (size_t i = 0; i < index.files.size(); ++i) {
    files.emplace(index.files[i].name, i);
    index.has_programs |= index.files[i].kind == "program";
  }
  check_sets(index, files, named);
  for (const auto& [object, places] : named.packs) {
    ReleasePack& pack = index.packs.emplace_back();
    pack.object = object;
    for (const auto& [name, at] : places) {
      const auto found = files.find(name);
      if (found == files.end() || at + index.files[found->second].object.size > object.size) {
        throw_format_error("a pack of {} bytes cannot hold '{}' at byte {}", object.size, name, at);
      }
      pack.files.emplace_back(found->second, at);
    }
  }
  return index;
}

/// Another form of a part. It is not used here, but must be sound.
struct Way {
  std::string encoding;
  int64_t object = -1;
  uint64_t at = 0;
  uint64_t stored = 0;
  bool has_base = false;
};

Way read_way(Fields& fields) {
  Way way;
  fields.tuple("a form of a part", 4, true, [&](size_t position) {
    if (position == 0) {
      way.encoding = fields.text("an encoding", is_encoding);
    } else if (position == 1) {
      if (!fields.json.take_literal("-1")) {
        way.object = static_cast<int64_t>(fields.number("the number of an object"));
      }
    } else if (position == 2) {
      way.at = fields.number("a place");
    } else if (position == 3) {
      way.stored = fields.number("a size");
    } else if (position == 4) {
      way.has_base =
          !fields.text("the base of a form", [](std::string_view text) { return text.empty() || is_sha256(text); })
               .empty();
    } else {
      fields.json.skip();
    }
  });
  return way;
}

bool is_sound(const Way& way, const std::vector<ReleaseObject>& objects) {
  if (way.encoding == "copy") {
    return way.object == -1 && way.stored == 0 && way.has_base;
  }
  return way.object >= 0 && static_cast<uint64_t>(way.object) < objects.size() &&
      way.at + way.stored <= objects[static_cast<size_t>(way.object)].size &&
      way.has_base == (way.encoding.substr(0, 5) == "patch");
}

std::vector<ReleasePart> parse_table(const std::string& bytes, const ReleaseObject& file) {
  std::vector<ReleasePart> parts;
  std::vector<std::pair<uint64_t, Way>> ways;
  std::vector<ReleaseObject> objects;
  ReleaseObject of;
  Fields fields(bytes);
  fields.object("the table", "format sha256 size parts ", [&](const std::string& key) {
    if (key == "format") {
      read_format(fields, "blobstore.table.1");
    } else if (key == "parts") {
      fields.array("the list of parts", kMostNumber, [&](size_t) {
        ReleasePart& part = parts.emplace_back();
        fields.tuple("a part", 3, true, [&](size_t position) {
          if (position == 0) {
            part.offset = fields.number("an offset");
          } else if (position == 1) {
            part.size = fields.number("the size of a part", 1);
          } else if (position == 2) {
            part.sha256 = fields.text("a SHA-256", is_sha256);
          } else if (position == 3) {
            fields.array(
                "the forms of a part", kMostWays, [&](size_t) { ways.emplace_back(part.offset, read_way(fields)); });
          } else {
            fields.json.skip();
          }
        });
      });
    } else if (key == "objects") {
      fields.array(
          "the list of objects", kMostObjects, [&](size_t) { objects.push_back(fields.content("an object")); });
    } else {
      return fields.content_field(key, of);
    }
    return true;
  });
  fields.json.end();
  if (of.sha256 != file.sha256 || of.size != file.size) {
    throw_format_error("this is the table of another file");
  }
  uint64_t end = 0;
  const auto check_hole = [&](uint64_t stop) {
    if (stop - end > kHoleLimit) {
      throw_format_error(
          "no part covers the {} bytes at {}; at most {} may lie between parts", stop - end, end, kHoleLimit);
    }
  };
  for (const ReleasePart& part : parts) {
    if (part.offset < end || part.offset + part.size > of.size) {
      throw_format_error(
          "the part of {} bytes at {} overlaps another one, or the end of the file at {}",
          part.size,
          part.offset,
          of.size);
    }
    check_hole(part.offset);
    end = part.offset + part.size;
  }
  check_hole(of.size);
  for (const auto& [offset, way] : ways) {
    if (!is_sound(way, objects)) {
      throw_format_error(
          "the part at {} cannot travel as '{}': it refers to bytes that are not there", offset, way.encoding);
    }
  }
  return parts;
}

/// Read something, and name the file in errors.
template <typename Read>
auto in_file(const std::string& bytes, const std::string& where, Read read) {
  try {
    if (!is_utf8(bytes)) {
      throw_format_error("it is not UTF-8");
    }
    return read();
  } catch (const FormatError& error) {
    throw_error_in(ErrorKind::InvalidFile, where, "this is not a part of a release: {}", error.what());
  }
}

} // namespace

uint64_t ReleaseIndex::size() const {
  uint64_t sum = 0;
  for (const ReleaseFile& file : files) {
    sum += file.object.size;
  }
  return sum;
}

bool is_sha256(std::string_view text) {
  return text.size() == 64 && text.find_first_not_of(kHexadecimal) == std::string_view::npos;
}

ReleaseIndex read_index(const std::string& bytes, const std::string& where) {
  return in_file(bytes, where, [&] { return parse_index(bytes); });
}

std::vector<ReleasePart> read_table(const std::string& bytes, const ReleaseObject& file, const std::string& where) {
  return in_file(bytes, where, [&] { return parse_table(bytes, file); });
}

std::string table_text(const ReleaseObject& file, const std::vector<ReleasePart>& parts) {
  std::string text =
      format("{\"format\":\"blobstore.table.1\",\"sha256\":\"{}\",\"size\":{},\"parts\":[", file.sha256, file.size);
  for (const ReleasePart& part : parts) {
    text += format("{}[{},{},\"{}\",[]]", &part == parts.data() ? "" : ",", part.offset, part.size, part.sha256);
  }
  return text + "]}";
}

std::vector<ReleaseObject> read_merged(const std::string& bytes, const std::string& where) {
  return in_file(bytes, where, [&] {
    std::vector<ReleaseObject> files;
    Fields fields(bytes);
    fields.json.object([&](const std::string&) { files.push_back(fields.content("a merged file")); });
    fields.json.end();
    return files;
  });
}

std::optional<bool> is_older(std::string_view version, std::string_view other) {
  std::vector<unsigned> one = numbers_of(version);
  std::vector<unsigned> two = numbers_of(other);
  if (one.empty() || two.empty()) {
    return std::nullopt;
  }
  one.resize(kMostNumbers);
  two.resize(kMostNumbers);
  return one < two;
}

} // namespace blobstore::internal
