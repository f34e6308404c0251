#include "releases/index.h"

#include <algorithm>

#include "format/constants.h"
#include "os/text.h"
#include "releases/fields.h"

namespace blobstore::internal {
namespace {

constexpr size_t kMostName = 1024; // characters
constexpr size_t kMostPartOfName = 255; // bytes
constexpr size_t kMostFolders = 32;
constexpr size_t kMostNumbers = 4; // of a version
constexpr std::string_view kDigits = "0123456789";

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
  return text == "program" || text == "data" || text == "adapter" || text == "other";
}

size_t characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xc0) != 0x80; }));
}

/// The name of a file.
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

ReleaseFile read_file(Fields& fields) {
  ReleaseFile file;
  fields.object("a file", "name kind sha256 size ", [&](const std::string& key) {
    if (key == "name") {
      file.name = fields.text("the name of a file", is_text);
    } else if (key == "kind") {
      file.kind = fields.text("the kind of a file", is_kind);
    } else if (key == "sha256") {
      file.object.sha256 = fields.text("a SHA-256", is_sha256);
    } else if (key == "size") {
      file.object.size = fields.number("a size");
    } else if (key == "data") {
      fields.array("the data files of a program", kMostFiles, [&](size_t) {
        file.data.push_back(fields.text("the name of a data file", is_text));
      });
    } else {
      return false;
    }
    return true;
  });
  if (!leads_inside(file.name)) {
    throw_format_error(
        "'{}' cannot be the name of a file of a release: expected a plain path that leads into a folder", file.name);
  }
  return file;
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

void check_data(const ReleaseIndex& index) {
  Positions files;
  for (size_t i = 0; i < index.files.size(); ++i) {
    files.emplace(index.files[i].name, i);
  }
  for (const ReleaseFile& file : index.files) {
    if (!file.data.empty() && file.kind != "program") {
      throw_format_error("'{}' takes data, and is no program", file.name);
    }
    for (const std::string& name : file.data) {
      const auto found = files.find(name);
      if (found == files.end() || index.files[found->second].kind != "data") {
        throw_format_error("program '{}' takes '{}', which is no data file of the release", file.name, name);
      }
    }
  }
}

/// Read a field that indexes of every format have; false for others.
bool read_mark_field(Fields& fields, const std::string& key, ReleaseMark& mark) {
  if (key == "name") {
    mark.name = fields.text("the name of a release", is_name);
  } else if (key == "version") {
    mark.version = fields.text("the version of a release", is_name);
  } else if (key == "published") {
    mark.published = fields.number("the time of publishing");
  } else {
    return false;
  }
  return true;
}

ReleaseIndex parse_index(const std::string& bytes) {
  ReleaseIndex index;
  Fields fields(bytes);
  constexpr std::string_view kRequired = "format name version published executorch files parts ";
  fields.object("the index", kRequired, [&](const std::string& key) {
    if (key == "format") {
      fields.format_is("blobstore.release.1");
    } else if (key == "executorch") {
      index.executorch = fields.text("a version of ExecuTorch", is_version);
    } else if (key == "files") {
      fields.array("the list of files", kMostFiles, [&](size_t) { index.files.push_back(read_file(fields)); });
    } else if (key == "parts") {
      index.parts = fields.content("the list of parts");
    } else if (key == "plain") {
      index.plain = fields.flag("plain");
    } else {
      return read_mark_field(fields, key, index);
    }
    return true;
  });
  fields.json.end();
  check_names(index.files);
  check_sizes(index.files);
  check_data(index);
  if (index.parts.size > kTableLimit || index.parts.packed) {
    throw_format_error("the list of parts has {} bytes, at most {} are possible", index.parts.size, kTableLimit);
  }
  return index;
}

} // namespace

uint64_t ReleaseIndex::size() const {
  uint64_t sum = 0;
  for (const ReleaseFile& file : files) {
    sum += file.object.size;
  }
  return sum;
}

bool ReleaseFile::is_data() const {
  return kind == "data" || kind == "adapter";
}

void ReleaseIndex::check_executorch(const std::string& has, const std::string& where) const {
  const bool has_programs =
      std::any_of(files.begin(), files.end(), [](const ReleaseFile& file) { return file.kind == "program"; });
  if (has_programs && !has.empty() && is_older(has, executorch) != false) {
    throw_error_in(
        ErrorKind::Release,
        where,
        "the programs of {} {} need ExecuTorch {}, this device has {}",
        name,
        version,
        executorch,
        has);
  }
}

const ReleaseFile* ReleaseIndex::find(std::string_view name_of_file) const {
  const auto found =
      std::find_if(files.begin(), files.end(), [&](const ReleaseFile& file) { return file.name == name_of_file; });
  return found == files.end() ? nullptr : &*found;
}

std::vector<const ReleaseFile*> ReleaseIndex::distinct() const {
  std::vector<const ReleaseFile*> found;
  Positions seen;
  for (const ReleaseFile& file : files) {
    if (seen.emplace(file.object.sha256, 0).second) {
      found.push_back(&file);
    }
  }
  return found;
}

ReleaseIndex read_index(const std::string& bytes, const std::string& where) {
  return in_file(bytes, where, "an index", [&] { return parse_index(bytes); });
}

ReleaseMark read_mark(const std::string& bytes, const std::string& where) {
  return in_file(bytes, where, "an index", [&] {
    ReleaseMark mark;
    Fields fields(bytes);
    fields.object("the index", "name version published ", [&](const std::string& key) {
      return read_mark_field(fields, key, mark);
    });
    fields.json.end();
    return mark;
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
