#include "format/file_kind.h"

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include <blobstore/error.h>

#include "format/constants.h"
#include "format/ptd_file.h"
#include "os/file.h"
#include "os/paths.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

bool begins_as_page(std::string_view head) {
  const size_t text = head.find_first_not_of(" \t\n\r\v\f");
  std::string lower(head.substr(text == std::string_view::npos ? head.size() : text));
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return lower.rfind("<!doctype html", 0) == 0 || lower.rfind("<html", 0) == 0;
}

const char* name_of(FileKind kind) {
  constexpr const char* kNames[] = {
      "a .pte program", "a .ptd data file", "a .safetensors file", "an HTML page", "a file of an unknown format"};
  return kNames[static_cast<int>(kind)];
}

bool is_of_programs(const std::string& path) {
  try {
    const PtdFile file(path);
    const auto found = file.metadata().find(kOfProgramsKey);
    return found != file.metadata().end() && found->second == "1";
  } catch (const Error&) {
    return false; // whatever it is, it is not that
  }
}

/// Refuse to make a data file under the name of another format.
void check_name(const std::string& path) {
  for (const auto& [ending, kind] :
       {std::pair(".pte", FileKind::Program),
        std::pair(".safetensors", FileKind::Safetensors),
        std::pair(".html", FileKind::Html)}) {
    if (ends_with(path, ending)) {
      throw_error_in(
          ErrorKind::OutputPath,
          path,
          "this is the name of {}, and {} would be written",
          name_of(kind),
          name_of(FileKind::Data));
    }
  }
}

} // namespace

FileKind file_kind(const std::string& path) {
  const File file(path, /*writable=*/false);
  char first[64];
  const auto size = static_cast<size_t>(std::min<uint64_t>(file.size(), sizeof first));
  if (size == 0) {
    throw_error_in(ErrorKind::InvalidFile, path, "the file is empty");
  }
  file.read(first, size, 0);
  const std::string_view head(first, size);
  const auto has = [&](size_t at, std::string_view text) { return size >= at && head.substr(at, text.size()) == text; };
  if (has(4, "FT01")) {
    return FileKind::Data;
  }
  if (has(4, "ET")) {
    return FileKind::Program;
  }
  // A .safetensors has no magic. It starts with the length of a JSON object and the brace of that object.
  if (has(8, "{") && has(6, std::string_view("\0\0", 2))) {
    return FileKind::Safetensors;
  }
  return begins_as_page(head) ? FileKind::Html : FileKind::Unknown;
}

void check_data_output(const std::string& path, const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    if (same_file(path, input)) {
      throw_error_in(ErrorKind::OutputPath, path, "the output is one of the inputs, {}", input);
    }
  }
  FileKind kind = FileKind::Data;
  try {
    kind = file_kind(path);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::InvalidFile && error.number() != ENOENT) {
      throw;
    }
    if (error.number() == ENOENT) {
      check_name(path);
    }
    return; // it is empty, or does not exist
  }
  if (kind != FileKind::Data) {
    throw_error_in(
        ErrorKind::OutputPath,
        path,
        "this is {} and would be replaced by {}; remove it, or use force (--force)",
        name_of(kind),
        name_of(FileKind::Data));
  }
  if (is_of_programs(path)) {
    throw_error_in(
        ErrorKind::OutputPath,
        path,
        "this data file was written together with programs, which would not find their weights any more; choose "
        "another "
        "name, or use force (--force)");
  }
}

} // namespace blobstore::internal
