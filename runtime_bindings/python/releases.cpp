// The library's own releases, beside those of the Python package: for tests that compare the two.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <blobstore/releases.h>

#include "codec/decoder.h"
#include "convert.h"
#include "format/format_error.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;

ReleaseOptions options_of(
    const std::string& sha256, bool allow_rollback, const std::string& executorch, const nb::bytes& ways, bool plain) {
  ReleaseOptions options;
  options.ways = to_string(ways);
  options.plain = plain;
  options.sha256 = sha256;
  options.allow_rollback = allow_rollback;
  options.executorch = executorch;
  return options;
}

/// (name, version, sha256, current, release bytes, bytes, folder, [(url, range or None, size, sha256, file)])
nb::tuple missing_of(
    const nb::bytes& index,
    const nb::bytes& directory,
    const std::string& sha256,
    bool allow_rollback,
    const std::string& executorch,
    const nb::bytes& ways,
    bool plain) {
  const std::string path = to_string(index);
  const std::string folder = to_string(directory);
  const ReleaseOptions options = options_of(sha256, allow_rollback, executorch, ways, plain);
  Missing found;
  {
    const WithoutInterpreter release;
    found = missing(path, folder, options);
  }
  nb::list fetches;
  for (const Fetch& one : found.fetches) {
    const nb::object range = one.range.empty() ? nb::none() : nb::object(nb::str(one.range.c_str()));
    fetches.append(nb::make_tuple(one.url, range, one.size, one.sha256, one.file));
  }
  return nb::make_tuple(
      found.name,
      found.version,
      found.sha256,
      found.current,
      found.release_bytes,
      found.bytes,
      to_bytes(found.folder),
      fetches);
}

/// (name, version, sha256, path, changed, release bytes)
nb::tuple commit_of(
    const nb::bytes& index,
    const nb::bytes& directory,
    const std::string& sha256,
    bool allow_rollback,
    const std::string& executorch,
    const nb::bytes& ways,
    bool plain) {
  const std::string path = to_string(index);
  const std::string folder = to_string(directory);
  const ReleaseOptions options = options_of(sha256, allow_rollback, executorch, ways, plain);
  InstalledRelease done;
  {
    const WithoutInterpreter release;
    done = commit(path, folder, options);
  }
  return nb::make_tuple(done.name, done.version, done.sha256, to_bytes(done.path), done.changed, done.release_bytes);
}

/// (releases, files, bytes, in use)
nb::tuple gc_of(const nb::bytes& directory, uint64_t keep) {
  const std::string folder = to_string(directory);
  Collected done;
  {
    const WithoutInterpreter release;
    done = gc(folder, keep);
  }
  return nb::make_tuple(done.releases, done.files, done.nbytes, done.in_use);
}

std::shared_ptr<Release> open_of(
    const nb::bytes& directory,
    const std::optional<std::vector<std::string>>& data,
    std::shared_ptr<PackedStore> packed) {
  const OpenOptions options{data, std::move(packed), /*executorch=*/""}; // Python compares it
  const std::string folder = to_string(directory);
  const WithoutInterpreter release;
  return Release::open(folder, options);
}

/// (version, sha256, taken, keys, reasons, files, generation, adapters, unfit)
nb::tuple follow_of(Release& live, bool newer_adapters) {
  const FollowAdapters choice = newer_adapters ? FollowAdapters::Release : FollowAdapters::Keep;
  Followed done;
  {
    const WithoutInterpreter release;
    done = live.follow(choice);
  }
  return nb::make_tuple(
      done.version,
      done.sha256,
      done.taken,
      done.keys,
      done.reasons,
      done.files,
      done.generation,
      done.adapters,
      done.unfit);
}

/// The bytes of an encoded content. @throws ValueError: it is malformed.
nb::bytes decoded_of(const std::string& encoding, uint64_t size, const nb::bytes& stored, const nb::bytes& base) {
  const std::string all = to_string(stored);
  const std::string other = to_string(base);
  const auto reader = [](const std::string& from) {
    return [&from](uint8_t* out, size_t count, uint64_t at) {
      if (at > from.size() || count > from.size() - at) {
        throw nb::value_error("the base is too short");
      }
      std::copy_n(from.data() + at, count, out);
    };
  };
  std::string found;
  try {
    const std::optional<internal::Encoding> known = internal::read_encoding(encoding);
    if (!known) {
      throw nb::value_error("an encoding that is not known");
    }
    internal::decode(*known, size, all.size(), reader(all), reader(other), [&](const uint8_t* data, size_t count) {
      found.append(reinterpret_cast<const char*>(data), count);
    });
  } catch (const internal::FormatError& error) {
    throw nb::value_error(error.what());
  }
  return to_bytes(found);
}

} // namespace

void add_releases(nb::module_& module) {
  module.def(
      "missing",
      &missing_of,
      "index"_a,
      "directory"_a,
      "sha256"_a = "",
      "allow_rollback"_a = false,
      "executorch"_a = "1.5",
      "ways"_a = nb::bytes(""),
      "plain"_a = false);
  module.def(
      "commit",
      &commit_of,
      "index"_a,
      "directory"_a,
      "sha256"_a = "",
      "allow_rollback"_a = false,
      "executorch"_a = "1.5",
      "ways"_a = nb::bytes(""),
      "plain"_a = false);
  module.def("collect_releases", &gc_of, "directory"_a, "keep"_a = 1);
  nb::class_<Release>(module, "Release")
      .def_static("open", &open_of, "directory"_a, "data"_a.none(), "packed"_a.none())
      .def_prop_ro("sha256", &Release::sha256)
      .def_prop_ro("cache", &Release::cache)
      .def("follow", &follow_of, "newer_adapters"_a)
      .def("close", &Release::close);
  module.def("decoded", &decoded_of, "encoding"_a, "size"_a, "stored"_a, "base"_a = nb::bytes(""));
}

} // namespace blobstore::python
