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

/// Options by their names, of which those that are not given are as for an application.
ReleaseOptions options_of(const nb::kwargs& given) {
  ReleaseOptions options;
  for (const auto& [key, value] : given) {
    const auto name = nb::cast<std::string>(key);
    if (name == "sha256") {
      options.sha256 = nb::cast<std::string>(value);
    } else if (name == "executorch") {
      options.executorch = nb::cast<std::string>(value);
    } else if (name == "ways") {
      options.ways = nb::cast<RawText>(value);
    } else if (name == "allow_rollback") {
      options.allow_rollback = nb::cast<bool>(value);
    } else if (name == "plain") {
      options.plain = nb::cast<bool>(value);
    } else {
      throw nb::type_error(("no option is called " + name).c_str());
    }
  }
  return options;
}

/// (name, version, sha256, current, release bytes, bytes, folder, [(url, range or None, size, sha256, file)])
nb::tuple missing_of(const RawText& index, const RawText& directory, const nb::kwargs& given) {
  const ReleaseOptions options = options_of(given);
  const Missing found = without_interpreter([&] { return missing(index, directory, options); });
  nb::list fetches;
  for (const Fetch& one : found.fetches) {
    const auto range = one.range.empty() ? std::nullopt : std::optional(one.range);
    fetches.append(nb::make_tuple(one.url, range, one.size, one.sha256, one.file));
  }
  return nb::make_tuple(
      found.name,
      found.version,
      found.sha256,
      found.current,
      found.release_bytes,
      found.bytes,
      RawText(found.folder),
      fetches);
}

/// (name, version, sha256, path, changed, release bytes)
nb::tuple commit_of(const RawText& index, const RawText& directory, const nb::kwargs& given) {
  const ReleaseOptions options = options_of(given);
  const InstalledRelease done = without_interpreter([&] { return commit(index, directory, options); });
  return nb::make_tuple(done.name, done.version, done.sha256, RawText(done.path), done.changed, done.release_bytes);
}

/// (releases, files, bytes, in use)
nb::tuple gc_of(const RawText& directory, uint64_t keep) {
  const Collected done = without_interpreter([&] { return gc(directory, keep); });
  return nb::make_tuple(done.releases, done.files, done.nbytes, done.in_use);
}

std::shared_ptr<Release> open_of(
    const RawText& directory,
    const std::optional<std::vector<std::string>>& data,
    std::shared_ptr<PackedStore> packed) {
  return Release::open(directory, {data, std::move(packed), /*executorch=*/""}); // Python compares it
}

/// (version, sha256, taken, keys, reasons, files, generation, adapters, unfit)
nb::tuple follow_of(Release& live, bool newer_adapters) {
  const FollowAdapters choice = newer_adapters ? FollowAdapters::Release : FollowAdapters::Keep;
  const Followed done = without_interpreter([&] { return live.follow(choice); });
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
RawText decoded_of(const std::string& encoding, uint64_t size, const RawText& stored, const RawText& base) {
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
    internal::decode(*known, size, stored.size(), reader(stored), reader(base), [&](const uint8_t* data, size_t count) {
      found.append(reinterpret_cast<const char*>(data), count);
    });
  } catch (const internal::FormatError& error) {
    throw nb::value_error(error.what());
  }
  return found;
}

} // namespace

void add_releases(nb::module_& module) {
  module.def("missing", &missing_of, "index"_a, "directory"_a, "options"_a);
  module.def("commit", &commit_of, "index"_a, "directory"_a, "options"_a);
  module.def("collect_releases", &gc_of, "directory"_a, "keep"_a = 1);
  nb::class_<Release>(module, "Release")
      .def_static(
          "open", &open_of, "directory"_a, "data"_a.none(), "packed"_a.none(), nb::call_guard<WithoutInterpreter>())
      .def_prop_ro("sha256", &Release::sha256)
      .def_prop_ro("cache", &Release::cache)
      .def("follow", &follow_of, "newer_adapters"_a)
      .def("close", &Release::close);
  module.def("decoded", &decoded_of, "encoding"_a, "size"_a, "stored"_a, "base"_a = RawText());
}

} // namespace blobstore::python
