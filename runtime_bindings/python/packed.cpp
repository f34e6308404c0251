#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <blobstore/packed.h>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;

/// The members of each PackedFile.
nb::list to_list(const std::vector<PackedFile>& files) {
  nb::list rows;
  for (const PackedFile& file : files) {
    rows.append(
        nb::make_tuple(
            RawText(file.path),
            file.size,
            file.entries,
            file.mapped,
            file.used,
            file.in_use,
            RawText(file.problem),
            file.unchecked));
  }
  return rows;
}

/// The members of PackedStats; reasons and heap bytes come last.
nb::tuple stats_of_store(const PackedStore& store) {
  const PackedStats found = store.stats();
  nb::list reasons;
  for (const auto& [reason, count] : found.reasons) {
    reasons.append(nb::make_tuple(RawText(reason), count));
  }
  return nb::make_tuple(
      found.hits,
      found.builds,
      found.fallbacks,
      found.written,
      found.repacked,
      found.dropped,
      found.verified_bytes,
      found.mapped_bytes,
      reasons,
      found.heap_bytes);
}

template <std::vector<PackedFile> (PackedStore::*function)() const>
nb::list files(const PackedStore& store) {
  return to_list(without_interpreter([&] { return (store.*function)(); }));
}

} // namespace

void add_packed(nb::module_& module) {
  nb::class_<PackedStore>(module, "PackedStore")
      .def_static(
          "open",
          [](const RawText& folder, uint64_t limit, bool verify, uint64_t read_ahead) {
            return PackedStore::open(folder, {limit, verify, read_ahead});
          },
          "folder"_a,
          "limit"_a,
          "verify"_a,
          "read_ahead"_a)
      .def_prop_ro("folder", [](const PackedStore& store) { return RawText(store.folder()); })
      .def("stats", &stats_of_store)
      .def("list", &files<&PackedStore::list>)
      .def("verify", &files<&PackedStore::verify>)
      .def("gc", &files<&PackedStore::gc>);
}

} // namespace blobstore::python
