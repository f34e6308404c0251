// BlobCache in Python, with Reading, CacheScope and what delegates report.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <blobstore/cache.h>
#include <blobstore/delegate.h>
#include <blobstore/packed.h>
#include <blobstore/reading.h>

#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;

/// A read-only view of a blob that holds the cache.
nb::object view(const std::shared_ptr<BlobCache>& cache, const std::string& key) {
  const Blob& blob = cache->at(key);
  return to_array(blob.data, blob.size, cache);
}

/// @param changes a list of (key, buffer, layout or None, whether to check the layout).
uint64_t update_blobs(BlobCache& cache, const nb::list& changes) {
  Buffers buffers;
  std::vector<Change> native;
  std::vector<std::optional<Layout>> layouts;
  native.reserve(changes.size());
  layouts.reserve(changes.size());
  for (const nb::handle item : changes) {
    const nb::tuple change = nb::cast<nb::tuple>(item);
    const Py_buffer& buffer = buffers.take(change[1]);
    layouts.push_back(layout_from(change[2]));
    native.push_back(
        {nb::cast<std::string>(change[0]),
         buffer.buf,
         static_cast<size_t>(buffer.len),
         nb::cast<bool>(change[3]) ? &layouts.back() : nullptr});
  }
  const WithoutInterpreter release;
  return cache.update(native);
}

nb::dict stats(const BlobCache& cache) {
  const CacheStats found = without_interpreter([&] { return cache.stats(); });
  nb::dict out;
  out["keys"] = found.keys;
  out["mapped_bytes"] = found.mapped_bytes;
  out["resident_bytes"] = found.resident_bytes ? nb::cast(*found.resident_bytes) : nb::none();
  out["private_bytes"] = found.private_bytes ? nb::cast(*found.private_bytes) : nb::none();
  out["dirty_keys"] = found.dirty_keys;
  out["dirty_bytes"] = found.dirty_bytes;
  out["lookups"] = found.lookups;
  out["misses"] = found.misses;
  out["commits"] = found.commits;
  out["reverts"] = found.reverts;
  return out;
}

/// A Reading, or a CacheScope, as a context manager.
template <typename Guard>
class Held {
 public:
  explicit Held(std::shared_ptr<BlobCache> cache) : cache_(std::move(cache)) {}
  void enter() {
    if constexpr (std::is_constructible_v<Guard, BlobCache&>) {
      guard_.emplace(*cache_);
    } else {
      guard_.emplace(cache_);
    }
  }
  void leave() { guard_.reset(); }

 private:
  std::shared_ptr<BlobCache> cache_;
  std::optional<Guard> guard_;
};

template <typename Guard>
void add_held(nb::module_& module, const char* name) {
  nb::class_<Held<Guard>>(module, name)
      .def(nb::init<std::shared_ptr<BlobCache>>())
      .def("enter", &Held<Guard>::enter, nb::call_guard<WithoutInterpreter>())
      .def("leave", &Held<Guard>::leave, nb::call_guard<WithoutInterpreter>());
}

BlobCache::Mode mode_from(const std::string& mode) {
  if (mode == "private") {
    return BlobCache::Mode::Private;
  }
  return mode == "shared" ? BlobCache::Mode::Shared : BlobCache::Mode::Copy;
}

} // namespace

void add_cache(nb::module_& module) {
  nb::class_<BlobCache>(module, "BlobCache")
      .def_static(
          "open",
          [](const std::vector<RawText>& paths,
             const std::string& mode,
             std::shared_ptr<BlobCache> base,
             std::shared_ptr<PackedStore> packed) {
            return BlobCache::open({paths.begin(), paths.end()}, mode_from(mode), std::move(base), std::move(packed));
          },
          "paths"_a,
          "mode"_a,
          "base"_a.none(),
          "packed"_a.none(),
          nb::call_guard<WithoutInterpreter>())
      .def_prop_ro("id", &BlobCache::id)
      .def_prop_ro("name", [](const BlobCache& cache) { return RawText(cache.name()); })
      .def_prop_ro("generation", &BlobCache::generation)
      .def_prop_ro("closed", &BlobCache::closed)
      .def("close", &BlobCache::close)
      .def("__len__", &BlobCache::size)
      .def("contains", [](const BlobCache& cache, const std::string& key) { return cache.find(key) != nullptr; })
      .def("owns", [](const BlobCache& cache, const std::string& key) { return cache.owns(key); })
      .def(
          "keys",
          [](const BlobCache& cache) {
            nb::list keys;
            for (size_t i = 0; i < cache.size(); ++i) {
              keys.append(nb::str(cache.blob(i).key.data(), cache.blob(i).key.size()));
            }
            return keys;
          })
      .def("layout", [](const BlobCache& cache, const std::string& key) { return layout_object(cache.at(key).layout); })
      .def("alignment", [](const BlobCache& cache, const std::string& key) { return cache.at(key).alignment; })
      .def("view", &view, "key"_a)
      .def("version", [](const BlobCache& cache, const std::string& key) { return cache.version(key); })
      .def(
          "recorded_digest",
          [](const BlobCache& cache, const std::string& key) {
            return std::optional<RawText>(cache.recorded_digest(key));
          })
      .def("update", &update_blobs, "changes"_a)
      .def(
          "load",
          [](BlobCache& cache, const RawText& path) { return cache.load(path); },
          "path"_a,
          nb::call_guard<WithoutInterpreter>())
      .def(
          "revert", [](BlobCache& cache) { return cache.revert(); }, nb::call_guard<WithoutInterpreter>())
      .def(
          "revert_keys",
          [](BlobCache& cache, const std::vector<std::string>& keys) { return cache.revert(keys); },
          "keys"_a,
          nb::call_guard<WithoutInterpreter>())
      .def("check_files", &BlobCache::check_files, nb::call_guard<WithoutInterpreter>())
      .def("dirty", &BlobCache::dirty, nb::call_guard<WithoutInterpreter>())
      .def("verify", &BlobCache::verify, nb::call_guard<WithoutInterpreter>())
      .def("stats", &stats);
  add_held<BlobCache::Reading>(module, "Reading");
}

void add_delegates(nb::module_& module) {
  register_delegate();
  add_held<CacheScope>(module, "CacheScope");
  module.def("delegate_stats", [] {
    const DelegateStats found = delegate_stats();
    nb::dict out;
    out["handles"] = found.handles;
    out["inits"] = found.inits;
    out["names"] = found.names;
    return out;
  });
  module.def("take_delegate_failure", [] {
    const auto failure = take_delegate_failure();
    return failure ? std::optional<RawText>(failure->reason) : std::nullopt;
  });
}

} // namespace blobstore::python
