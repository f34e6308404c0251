// The tensors of a model by name, and the steps that lay them out, in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <map>

#include "convert.h"
#include "dense.h"
#include "interpreter.h"
#include "logical/cache_tensors.h"
#include "logical/numbers.h"
#include "logical/reorder.h"
#include "logical/similar_names.h"
#include "logical/steps.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;
using namespace internal;

/// A data map of Python as a source of blobs. Used only while the interpreter is held.
class PythonSource final : public BlobSource {
 public:
  explicit PythonSource(nb::object map) : map_(std::move(map)) {
    const nb::tuple listed = nb::cast<nb::tuple>(call_python(helpers().list_map, map_));
    name_ = nb::cast<RawText>(listed[0]);
    keys_ = nb::cast<std::vector<std::string>>(listed[1]);
    for (const std::string& key : keys_) {
      known_.emplace(key, Known());
    }
  }

  const std::string& name() const override { return name_; }
  size_t size() const override { return keys_.size(); }
  std::string_view key(size_t index) const override { return keys_[index]; }
  std::optional<SourceBlob> find(std::string_view key) const override {
    const auto found = known_.find(key);
    if (found == known_.end()) {
      return std::nullopt;
    }
    Known& known = found->second;
    const nb::object name = nb::str(key.data(), key.size());
    const nb::tuple read = nb::cast<nb::tuple>(call_python(helpers().read_map, map_, name)); // finds a truncated file
    if (!known.object.is_valid()) {
      known.object = read[0];
      known.layout = layout_from(read[1]);
      const Py_buffer& buffer = buffers_.take(known.object);
      known.data = static_cast<const uint8_t*>(buffer.buf);
      known.size = static_cast<size_t>(buffer.len);
    }
    return SourceBlob{known.data, known.size, &known.layout};
  }

 private:
  struct Known {
    nb::object object;
    const uint8_t* data = nullptr;
    size_t size = 0;
    std::optional<Layout> layout;
  };

  nb::object map_;
  std::string name_;
  std::vector<std::string> keys_;
  mutable TextMap<Known> known_;
  mutable Buffers buffers_;
};

/// Bytes, which may be those of a Python object.
nb::object to_array_over(const TensorView& view, const nb::object& source) {
  if (view.owner != nullptr) {
    return to_array(view.data, view.nbytes, view.owner);
  }
  return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(view.data, {view.nbytes}, source));
}

nb::str to_str(std::string_view text) {
  return nb::str(text.data(), text.size());
}

template <typename Texts>
nb::tuple to_strs(const Texts& texts) {
  nb::list out;
  for (const std::string_view text : texts) {
    out.append(to_str(text));
  }
  return nb::tuple(out);
}

Names views_of(const std::vector<std::string>& texts) {
  return Names(texts.begin(), texts.end());
}

/// @param item (name, buffer, layout or None, what messages call bytes without one).
Given given_from(nb::handle item, Buffers& buffers) {
  const nb::tuple parts = nb::cast<nb::tuple>(item);
  Given given;
  given.name = nb::cast<std::string>(parts[0]);
  const Py_buffer& buffer = buffers.take(parts[1]);
  given.value.data = static_cast<const uint8_t*>(buffer.buf);
  given.value.nbytes = static_cast<size_t>(buffer.len);
  if (const std::optional<Layout> layout = layout_from(parts[2])) {
    given.value.scalar_type = layout->scalar_type;
    given.value.sizes.assign(layout->sizes.begin(), layout->sizes.end());
    given.dim_order = layout->dim_order;
  } else {
    given.opaque = nb::cast<std::string>(parts[3]);
  }
  return given;
}

std::vector<Given> all_given(const nb::list& items, Buffers& buffers) {
  std::vector<Given> given;
  for (const nb::handle item : items) {
    given.push_back(given_from(item, buffers));
  }
  return given;
}

/// The tensors that the records of a data map describe: a native cache, or a map of Python.
class Tensors {
 public:
  explicit Tensors(std::shared_ptr<BlobCache> cache) : cache_(std::make_shared<CacheTensors>(std::move(cache))) {}
  explicit Tensors(nb::object map)
      : source_(std::make_shared<PythonSource>(std::move(map))), updates_(std::make_shared<Updates>(*source_)) {}

  const Updates& updates() const { return cache_ ? cache_->updates() : *updates_; }
  const Index& index() const { return updates().index(); }
  const CacheTensors& on_cache() const {
    if (cache_ == nullptr) {
      throw Error(ErrorKind::Unsupported, "these tensors are not on a cache");
    }
    return *cache_;
  }
  Names choose(const std::vector<Entry>& entries, bool strict) const {
    return run([&] { return cache_ ? cache_->choose(entries, strict) : updates_->choose(entries, strict); });
  }
  void check_open() const {
    if (cache_ != nullptr) {
      cache_->cache()->check_open();
    }
  }
  /// Run a function, without the interpreter if the blobs are a cache's.
  template <typename Function>
  auto run(Function function) const -> decltype(function()) {
    if (cache_ == nullptr) {
      return function();
    }
    const WithoutInterpreter release;
    return function();
  }
  std::shared_ptr<const void> owner() const {
    return cache_ ? std::shared_ptr<const void>(cache_->cache()) : std::shared_ptr<const void>(source_);
  }

 private:
  std::shared_ptr<CacheTensors> cache_;
  std::shared_ptr<PythonSource> source_;
  std::shared_ptr<Updates> updates_;
};

nb::tuple describe(const Tensors& tensors, const std::string& name) {
  const LogicalTensor found = tensors.updates().describe(name);
  return nb::make_tuple(
      to_str(found.name),
      static_cast<int>(found.scalar_type),
      to_tuple(found.sizes),
      to_strs(found.aliases),
      to_strs(found.keys),
      to_strs(found.needs),
      found.refusal,
      found.auxiliary);
}

/// @throws Error KeyNotFound: it is no text that UTF-8 can have, as all names are.
std::string name_from(const Tensors& tensors, nb::handle name) {
  Py_ssize_t size = 0;
  if (const char* text = PyUnicode_Check(name.ptr()) ? PyUnicode_AsUTF8AndSize(name.ptr(), &size) : nullptr) {
    return {text, static_cast<size_t>(size)};
  }
  PyErr_Clear();
  const nb::str shown(name);
  const nb::bytes escaped = nb::steal<nb::bytes>(PyUnicode_AsEncodedString(shown.ptr(), "utf-8", "backslashreplace"));
  throw tensors.updates().unknown(nb::cast<RawText>(escaped));
}

/// A tensor or an array whose memory is used as it is; empty for other values.
std::optional<Given> given_in_place(nb::handle value, Buffers& buffers) {
  std::optional<Dense> dense = dense_tensor(value);
  if (!dense && is_array(value)) {
    const Py_buffer* buffer = buffers.take_shaped(value);
    dense = buffer != nullptr ? dense_buffer(*buffer) : std::nullopt;
  }
  if (!dense) {
    return std::nullopt;
  }
  Given given;
  given.value.scalar_type = dense->scalar_type;
  given.value.sizes.assign(dense->sizes.begin(), dense->sizes.begin() + dense->rank);
  given.value.data = static_cast<const uint8_t*>(dense->data);
  given.value.nbytes = dense->nbytes;
  given.dim_order = row_major(dense->rank);
  return given;
}

} // namespace

nb::tuple to_tuple(const Updated& updated) {
  nb::list quantized;
  for (const Quantized& one : updated.quantized) {
    quantized.append(nb::make_tuple(to_str(one.name), to_str(one.key), one.numbers, one.clipped, one.rescaled));
  }
  return nb::make_tuple(updated.generation, nb::tuple(quantized));
}

namespace {

nb::tuple commit(const Tensors& tensors, const std::vector<Given>& given, bool finite, bool strict) {
  const CacheTensors& on_cache = tensors.on_cache();
  return to_tuple(tensors.run([&] { return on_cache.update(given, finite, strict); }));
}

/// @param values pairs of a name and a value. @param items_of (name, value) -> items, for values that are no dense
///   tensors.
nb::tuple update(const Tensors& tensors, const nb::list& values, nb::handle items_of, bool finite, bool strict) {
  std::vector<std::string> names;
  for (const nb::handle pair : values) {
    names.push_back(name_from(tensors, nb::cast<nb::tuple>(pair)[0]));
  }
  Buffers buffers;
  std::vector<Given> given;
  try {
    for (size_t i = 0; i < names.size(); ++i) {
      const nb::tuple pair = nb::cast<nb::tuple>(values[i]);
      if (std::optional<Given> one = given_in_place(pair[1], buffers)) {
        one->name = names[i];
        given.push_back(*std::move(one));
        continue;
      }
      const nb::object items = call_python(items_of, nb::object(pair[0]), nb::object(pair[1]));
      for (Given& one : all_given(nb::cast<nb::list>(items), buffers)) {
        given.push_back(std::move(one));
      }
    }
  } catch (...) {
    tensors.updates().check_names(views_of(names)); // a wrong name is said before a wrong value
    throw;
  }
  return commit(tensors, given, finite, strict);
}

nb::tuple value_of(const Tensors& tensors, const std::string& name) {
  tensors.check_open();
  const TensorView found = tensors.run([&] { return tensors.updates().value(name); });
  return nb::make_tuple(
      to_array(found.data, found.nbytes, found.owner ? found.owner : tensors.owner()),
      static_cast<int>(found.scalar_type),
      to_tuple(found.sizes));
}

/// @param items (name, scalar type or -1, sizes or None).
std::vector<Shaped> shapes_from(const nb::list& items, std::deque<std::string>& names) {
  std::vector<Shaped> shapes;
  for (const nb::handle item : items) {
    const nb::tuple parts = nb::cast<nb::tuple>(item);
    names.push_back(nb::cast<std::string>(parts[0]));
    shapes.push_back(
        {names.back(),
         static_cast<int8_t>(nb::cast<int>(parts[1])),
         nb::cast<std::vector<int64_t>>(nb::list(parts[2]))});
  }
  return shapes;
}

/// @param record (key, size in bytes, steps), each step (operation, ints, floats, names).
/// @param items (buffer, layout). @param scales buffers by key.
nb::object lay_out_in_python(const nb::tuple& about, const nb::list& items, const nb::dict& scales) {
  Record record;
  record.key = nb::cast<std::string>(about[0]);
  record.nbytes = nb::cast<uint64_t>(about[1]);
  for (const nb::handle item : nb::cast<nb::tuple>(about[2])) {
    const nb::tuple parts = nb::cast<nb::tuple>(item);
    Step& step = record.steps.emplace_back();
    step.operation = static_cast<Operation>(nb::cast<int>(parts[0]));
    step.ints = nb::cast<std::vector<int64_t>>(nb::list(parts[1]));
    step.floats = nb::cast<std::vector<double>>(nb::list(parts[2]));
    step.names = nb::cast<std::vector<std::string>>(nb::list(parts[3]));
  }
  Buffers buffers;
  std::vector<TensorView> tensors;
  nb::object first;
  for (const nb::handle item : items) {
    const nb::tuple parts = nb::cast<nb::tuple>(item);
    const Given given = given_from(nb::make_tuple("", parts[0], parts[1], "bytes"), buffers);
    tensors.push_back(reorder(given.value, given.dim_order, row_major(given.dim_order.size())));
    first = first.is_valid() ? first : nb::borrow(parts[0]);
  }
  std::map<std::string, TensorView> by_key;
  for (const auto& [key, data] : scales) {
    const Py_buffer& buffer = buffers.take(data);
    const auto size = static_cast<size_t>(buffer.len);
    by_key[nb::cast<std::string>(key)] = {
        kByte, {static_cast<int64_t>(size)}, static_cast<const uint8_t*>(buffer.buf), size, nullptr};
  }
  TensorView made;
  {
    const WithoutInterpreter release;
    made = lay_out(record, tensors, [&](const std::string& key) {
      const auto found = by_key.find(key);
      if (found == by_key.end()) {
        throw Error(ErrorKind::KeyNotFound, "no scales '" + key + "'");
      }
      return found->second;
    });
  }
  return to_array_over(made, first);
}

} // namespace

const CacheTensors& tensors_on_cache(nb::handle tensors) {
  return nb::cast<const Tensors&>(tensors).on_cache();
}

void add_tensors(nb::module_& module) {
  nb::class_<Tensors>(module, "Tensors")
      .def(nb::init<std::shared_ptr<BlobCache>>())
      .def(nb::init<nb::object>())
      .def(
          "names",
          [](const Tensors& tensors) {
            Names names;
            for (const internal::Tensor* tensor : tensors.index().tensors()) {
              names.push_back(tensor->names.front());
            }
            return to_strs(names);
          })
      .def(
          "contains",
          [](const Tensors& tensors, const std::string& name) { return tensors.index().find(name) != nullptr; })
      .def("refused", [](const Tensors& tensors) { return tensors.index().refused().size(); })
      .def("describe", &describe, "The members of a LogicalTensor.")
      .def(
          "check_names",
          [](const Tensors& tensors, const std::vector<std::string>& names) {
            tensors.updates().check_names(views_of(names));
          })
      .def(
          "check",
          [](const Tensors& tensors, const nb::tuple& item) {
            Buffers buffers;
            tensors.updates().check(given_from(item, buffers));
          })
      .def("update", &update, "values"_a, "items_of"_a, "finite"_a, "strict"_a)
      .def(
          "commit",
          [](const Tensors& tensors, const nb::list& items, bool finite) {
            Buffers buffers;
            return commit(tensors, all_given(items, buffers), finite, /*strict=*/false);
          },
          "items"_a,
          "finite"_a)
      .def("value", &value_of, "name"_a, "Bytes, scalar type and sizes.")
      .def(
          "choose",
          [](const Tensors& tensors, const nb::list& items, bool strict) {
            std::deque<std::string> names;
            std::vector<Entry> entries;
            for (const nb::handle item : items) {
              names.push_back(nb::cast<std::string>(nb::cast<nb::tuple>(item)[0]));
              const auto type = static_cast<int8_t>(nb::cast<int>(nb::cast<nb::tuple>(item)[1]));
              entries.push_back({names.back(), is_floating(type)});
            }
            return to_strs(tensors.choose(entries, strict));
          },
          "items"_a,
          "strict"_a,
          "The entries of a state dict to update; each item has a name and a scalar type, or -1.")
      .def(
          "check_stored",
          [](const Tensors& tensors, const std::string& origin) { tensors.updates().check_stored(origin); })
      .def(
          "check_reach",
          [](const Tensors& tensors, const nb::list& items, bool whole) {
            std::deque<std::string> names;
            const std::vector<Shaped> shapes = shapes_from(items, names);
            const CacheTensors& on_cache = tensors.on_cache();
            tensors.run([&] { on_cache.check_reach(shapes, whole); });
          },
          "items"_a,
          "whole"_a,
          "Each item has a name, a scalar type or -1, and sizes.")
      .def(
          "mismatch",
          [](const Tensors& tensors, const std::vector<std::string>& names) {
            return RawText(tensors.updates().mismatch(views_of(names)).what());
          })
      .def("unknown", [](const Tensors& tensors, const std::string& name) {
        return RawText(tensors.updates().unknown(name).what());
      });

  module.def("lay_out", &lay_out_in_python, "record"_a, "tensors"_a, "scales"_a);
  module.def(
      "cast",
      [](nb::object data, const nb::tuple& layout, int target) {
        Buffers buffers;
        const Given given = given_from(nb::make_tuple("", data, layout, "bytes"), buffers);
        TensorView made;
        {
          const WithoutInterpreter release;
          made = internal::cast(given.value, static_cast<int8_t>(target));
        }
        return to_array_over(made, data);
      },
      "data"_a,
      "layout"_a,
      "target"_a);
  module.def(
      "is_finite",
      [](nb::object data, const nb::tuple& layout) {
        Buffers buffers;
        const Given given = given_from(nb::make_tuple("", data, layout, "bytes"), buffers);
        const WithoutInterpreter release;
        return internal::is_finite(given.value);
      },
      "data"_a,
      "layout"_a);
  module.def(
      "near_names",
      [](const std::string& name, const std::vector<std::string>& known) {
        return to_strs(near(name, views_of(known)));
      },
      "name"_a,
      "known"_a,
      "Names that messages suggest.");
}

} // namespace blobstore::python
