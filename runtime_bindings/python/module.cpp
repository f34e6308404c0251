// The Python module: names and types only; everything it does is done by the library below it. blobstore/runtime.py
// gives it the shape that a user sees.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <blobstore/cache.h>
#include <blobstore/data_map.h>
#include <blobstore/delegate.h>
#include <blobstore/program.h>
#include <blobstore/reading.h>

#include "os/crash_point.h"
#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;

nb::bytes to_bytes(const std::string& text) {
  return nb::bytes(text.data(), text.size());
}

std::string to_string(const nb::bytes& bytes) {
  return std::string(bytes.c_str(), bytes.size());
}

const char* name_of(ErrorKind kind) {
  constexpr const char* kNames[] = {
      "invalid_file", "integrity", "file_access", "key_not_found",    "key_conflict", "layout",          "closed",
      "unsupported",  "program",   "method_not_found", "input",       "missing_backend", "execution",
  };
  return kNames[static_cast<int>(kind)];
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    try {
      nb::object made = run_python([&] {
        return helpers().make_error(
            name_of(error.kind()), to_bytes(error.path()), to_bytes(error.reason()), error.number());
      });
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())), made.ptr());
    } catch (nb::python_error& failed) {
      failed.restore();
    }
  }
}

/// A view of a blob that holds the cache.
nb::object view(const std::shared_ptr<BlobCache>& cache, const std::string& key, bool writable) {
  const Blob& blob = cache->at(key);
  auto* pin = new std::shared_ptr<BlobCache>(cache);
  nb::capsule owner(pin, [](void* held) noexcept { delete static_cast<std::shared_ptr<BlobCache>*>(held); });
  if (writable) {
    return nb::cast(nb::ndarray<nb::numpy, uint8_t>(blob.data, {blob.size}, owner));
  }
  return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(blob.data, {blob.size}, owner));
}

/// A list of (key, buffer, layout or None, whether to check the layout).
uint64_t update(BlobCache& cache, const nb::list& changes) {
  struct Buffers {
    std::vector<Py_buffer> list;
    ~Buffers() {
      for (Py_buffer& buffer : list) {
        PyBuffer_Release(&buffer);
      }
    }
  } buffers;
  std::vector<Change> native;
  std::vector<std::optional<Layout>> layouts;
  native.reserve(changes.size());
  layouts.reserve(changes.size());
  buffers.list.reserve(changes.size());
  for (const nb::handle item : changes) {
    const nb::tuple change = nb::cast<nb::tuple>(item);
    Py_buffer buffer;
    if (PyObject_GetBuffer(nb::handle(change[1]).ptr(), &buffer, PyBUF_SIMPLE) != 0) {
      throw nb::python_error();
    }
    buffers.list.push_back(buffer);
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
  CacheStats found;
  {
    const WithoutInterpreter release;
    found = cache.stats();
  }
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

nb::list infos(const std::vector<ValueInfo>& values) {
  nb::list out;
  for (const ValueInfo& value : values) {
    constexpr const char* kKinds[] = {"none", "tensor", "int", "float", "bool", "str", "other"};
    out.append(nb::make_tuple(
        kKinds[static_cast<int>(value.kind)],
        value.kind == ValueKind::Tensor ? layout_object(value.layout) : nb::none(),
        value.name));
  }
  return out;
}

/// Run a method and make its first results.
nb::list call_first(const std::shared_ptr<Method>& method, size_t count, const nb::args& values) {
  const Arguments arguments(values, method->inputs());
  std::vector<Value> results;
  {
    const WithoutInterpreter release;
    results = method->execute(arguments.list(), count);
  }
  return to_python(std::move(results), arguments.torch());
}

nb::list call(const std::shared_ptr<Method>& method, const nb::args& values) {
  return call_first(method, SIZE_MAX, values);
}

/// A tensor over memory of a method, that holds the method.
nb::object to_torch(const std::shared_ptr<Method>& method, const View& view) {
  auto* pin = new std::shared_ptr<Method>(method);
  nb::capsule owner(pin, [](void* held) noexcept { delete static_cast<std::shared_ptr<Method>*>(held); });
  const nb::object bytes =
      nb::cast(nb::ndarray<nb::numpy, uint8_t>(static_cast<uint8_t*>(view.data), {view.nbytes}, owner));
  return run_python([&] { return helpers().to_torch(bytes, layout_object(view.layout)); });
}

/// A Reading as a context manager.
class HeldReading {
 public:
  explicit HeldReading(std::shared_ptr<BlobCache> cache) : cache_(std::move(cache)) {}
  void enter() {
    const WithoutInterpreter release;
    reading_.emplace(*cache_);
  }
  void leave() {
    const WithoutInterpreter release;
    reading_.reset();
  }

 private:
  std::shared_ptr<BlobCache> cache_;
  std::optional<BlobCache::Reading> reading_;
};

/// A CacheScope as a context manager.
class HeldScope {
 public:
  explicit HeldScope(std::shared_ptr<BlobCache> cache) : cache_(std::move(cache)) {}
  void enter() { scope_.emplace(cache_); }
  void leave() { scope_.reset(); }

 private:
  std::shared_ptr<BlobCache> cache_;
  std::optional<CacheScope> scope_;
};

/// ExecuTorch's interface called as ExecuTorch calls it, for tests: results are (error number, value).
class DataMapProbe {
 public:
  explicit DataMapProbe(std::shared_ptr<BlobCache> cache) : map_(std::move(cache)) {}

  nb::tuple get_tensor_layout(const std::string& key) const {
    const auto found = map_.get_tensor_layout(key);
    if (!found.ok()) {
      return nb::make_tuple(static_cast<int>(found.error()), nb::none());
    }
    Layout layout;
    layout.scalar_type = static_cast<int8_t>(found->scalar_type());
    layout.sizes.assign(found->sizes().begin(), found->sizes().end());
    layout.dim_order.assign(found->dim_order().begin(), found->dim_order().end());
    return nb::make_tuple(0, layout_object(layout));
  }

  nb::tuple get_data(const std::string& key) const {
    using executorch::runtime::FreeableBuffer;
    auto found = map_.get_data(key);
    if (!found.ok()) {
      return nb::make_tuple(static_cast<int>(found.error()), nb::none());
    }
    auto* buffer = new FreeableBuffer(std::move(found.get()));
    nb::capsule owner(buffer, [](void* held) noexcept { delete static_cast<FreeableBuffer*>(held); });
    return nb::make_tuple(
        0,
        nb::cast(nb::ndarray<nb::numpy, const uint8_t>(
            static_cast<const uint8_t*>(buffer->data()), {buffer->size()}, owner)));
  }

  int load_data_into(const std::string& key, uintptr_t buffer, size_t size) const {
    return static_cast<int>(map_.load_data_into(key, reinterpret_cast<void*>(buffer), size));
  }

  uint32_t get_num_keys() const { return map_.get_num_keys().get(); }

  nb::tuple get_key(uint32_t index) const {
    const auto found = map_.get_key(index);
    return found.ok() ? nb::make_tuple(0, nb::str(*found)) : nb::make_tuple(static_cast<int>(found.error()), nb::none());
  }

 private:
  CacheDataMap map_;
};

BlobCache::Mode mode_from(const std::string& mode) {
  if (mode == "private") {
    return BlobCache::Mode::Private;
  }
  return mode == "shared" ? BlobCache::Mode::Shared : BlobCache::Mode::Copy;
}

} // namespace

Helpers& helpers() {
  static auto* all = new Helpers;
  return *all;
}

nb::object layout_object(const std::optional<Layout>& layout) {
  if (!layout) {
    return nb::none();
  }
  nb::list sizes;
  nb::list order;
  for (const int32_t size : layout->sizes) {
    sizes.append(size);
  }
  for (const uint8_t dim : layout->dim_order) {
    order.append(static_cast<int>(dim));
  }
  return nb::make_tuple(static_cast<int>(layout->scalar_type), nb::tuple(sizes), nb::tuple(order));
}

std::optional<Layout> layout_from(nb::handle object) {
  if (object.is_none()) {
    return std::nullopt;
  }
  const nb::tuple parts = nb::cast<nb::tuple>(object);
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(nb::cast<int>(parts[0]));
  for (const nb::handle size : nb::cast<nb::tuple>(parts[1])) {
    layout.sizes.push_back(nb::cast<int32_t>(size));
  }
  for (const nb::handle dim : nb::cast<nb::tuple>(parts[2])) {
    layout.dim_order.push_back(static_cast<uint8_t>(nb::cast<int>(dim)));
  }
  return layout;
}

NB_MODULE(_native, module) {
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false); // objects that live until the interpreter ends are no leak
  Py_AtExit(&end_backend_work); // when daemon threads cannot call any more, but may still be in a call

  module.def(
      "set_helpers",
      [](nb::object as_bytes, nb::object to_numpy, nb::object to_torch, nb::object make_error) {
        helpers() = {std::move(as_bytes), std::move(to_numpy), std::move(to_torch), std::move(make_error)};
      },
      "as_bytes"_a,
      "to_numpy"_a,
      "to_torch"_a,
      "make_error"_a);
  module.def("crash_at", [](int point) { crash_point.store(point); }, "point"_a, "For tests: die at this point.");

  nb::class_<BlobCache>(module, "BlobCache")
      .def_static(
          "open",
          [](const std::vector<nb::bytes>& paths, const std::string& mode, std::shared_ptr<BlobCache> base) {
            std::vector<std::string> names;
            for (const nb::bytes& path : paths) {
              names.push_back(to_string(path));
            }
            const WithoutInterpreter release;
            return BlobCache::open(names, mode_from(mode), std::move(base));
          },
          "paths"_a,
          "mode"_a,
          "base"_a.none())
      .def_prop_ro("id", &BlobCache::id)
      .def_prop_ro("name", [](const BlobCache& cache) { return to_bytes(cache.name()); })
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
      .def("view", &view, "key"_a, "writable"_a)
      .def("version", [](const BlobCache& cache, const std::string& key) { return cache.version(key); })
      .def("recorded_digest", [](const BlobCache& cache, const std::string& key) -> nb::object {
        const auto digest = cache.recorded_digest(key);
        return digest ? nb::object(to_bytes(*digest)) : nb::none();
      })
      .def("update", &update, "changes"_a)
      .def(
          "load",
          [](BlobCache& cache, const nb::bytes& path) {
            const std::string name = to_string(path);
            const WithoutInterpreter release;
            return cache.load(name);
          },
          "path"_a)
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

  nb::class_<HeldReading>(module, "Reading")
      .def(nb::init<std::shared_ptr<BlobCache>>())
      .def("enter", &HeldReading::enter)
      .def("leave", &HeldReading::leave);

  register_delegate();
  nb::class_<HeldScope>(module, "CacheScope")
      .def(nb::init<std::shared_ptr<BlobCache>>())
      .def("enter", &HeldScope::enter)
      .def("leave", &HeldScope::leave);
  module.def(
      "served_delegates",
      [](const BlobCache& cache) {
        nb::list out;
        for (const ServedDelegate& one : served_delegates(cache)) {
          out.append(nb::make_tuple(
              one.method,
              to_bytes(one.program),
              one.inode,
              nb::cast(one.keys),
              nb::cast(one.others),
              nb::cast(one.same_files),
              nb::cast(one.other_files)));
        }
        return out;
      },
      "cache"_a,
      "Of each the members of ServedDelegate.");
  module.def("delegate_stats", [] {
    const DelegateStats found = delegate_stats();
    nb::dict out;
    out["handles"] = found.handles;
    out["inits"] = found.inits;
    out["names"] = found.names;
    return out;
  });
  module.def("take_delegate_failure", []() -> nb::object {
    const auto failure = take_delegate_failure();
    return failure ? nb::object(to_bytes(failure->reason)) : nb::none();
  });

  nb::class_<DataMapProbe>(module, "DataMapProbe")
      .def(nb::init<std::shared_ptr<BlobCache>>())
      .def("get_tensor_layout", &DataMapProbe::get_tensor_layout)
      .def("get_data", &DataMapProbe::get_data)
      .def("load_data_into", &DataMapProbe::load_data_into)
      .def("get_num_keys", &DataMapProbe::get_num_keys)
      .def("get_key", &DataMapProbe::get_key);

  nb::class_<Method>(module, "Method")
      .def_prop_ro("name", &Method::name)
      .def("inputs", [](const Method& method) { return infos(method.inputs()); })
      .def("outputs", [](const Method& method) { return infos(method.outputs()); })
      .def("__call__", &call)
      .def("call_first", &call_first)
      .def(
          "output_memory",
          [](const std::shared_ptr<Method>& method, size_t index) { return to_torch(method, method->output_memory(index)); })
      .def("state_memory", [](const std::shared_ptr<Method>& method) {
        nb::dict out;
        for (const auto& [name, view] : method->state_memory()) {
          out[nb::str(name.data(), name.size())] = to_torch(method, view);
        }
        return out;
      });

  nb::class_<Program>(module, "Program")
      .def_static(
          "load",
          [](const nb::bytes& path, std::shared_ptr<BlobCache> cache) {
            const std::string name = to_string(path);
            const WithoutInterpreter release;
            return Program::load(name, std::move(cache));
          },
          "path"_a,
          "cache"_a)
      .def_prop_ro("methods", &Program::methods)
      .def(
          "file",
          [](const std::shared_ptr<Program>& program) {
            auto* pin = new std::shared_ptr<Program>(program);
            nb::capsule owner(pin, [](void* held) noexcept { delete static_cast<std::shared_ptr<Program>*>(held); });
            const auto [data, size] = program->file();
            return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(data, {size}, owner));
          },
          "The bytes of its file, mapped.")
      .def("needs", &Program::needs)
      .def("backends", &Program::backends)
      .def("inputs", [](const Program& program, const std::string& name) { return infos(program.inputs(name)); })
      .def("outputs", [](const Program& program, const std::string& name) { return infos(program.outputs(name)); })
      .def("load_method", &Program::load_method, "name"_a, nb::call_guard<WithoutInterpreter>());
}

} // namespace blobstore::python
