// Adapters in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <blobstore/adapters.h>

#include "adapters/adapter_file.h"
#include "adapters/combine.h"
#include "adapters/exchange.h"
#include "adapters/foundation.h"
#include "adapters/lora_names.h"
#include "adapters/merge.h"
#include "adapters/peft_folder.h"
#include "convert.h"
#include "interpreter.h"

namespace blobstore::python {
namespace {

using namespace nb::literals;
using internal::AdapterAccess;
using internal::CacheTensors;
using internal::NamedViews;
using internal::TensorView;

/// Tensors by name in memory of Python objects, which it holds.
class PythonTensors {
 public:
  /// @param rows tuples of a name, a buffer, a scalar type and sizes.
  explicit PythonTensors(const nb::list& rows) {
    for (const nb::handle item : rows) {
      const nb::tuple row = nb::cast<nb::tuple>(item);
      const Py_buffer& buffer = buffers_.take(row[1]);
      views_.emplace_back(
          nb::cast<std::string>(row[0]),
          TensorView{
              static_cast<int8_t>(nb::cast<int>(row[2])),
              nb::cast<std::vector<int64_t>>(nb::list(row[3])),
              static_cast<const uint8_t*>(buffer.buf),
              static_cast<size_t>(buffer.len),
              nullptr});
    }
  }

  const NamedViews& views() const { return views_; }

 private:
  Buffers buffers_;
  NamedViews views_;
};

/// The members of each NamedTensor.
nb::list to_list(const std::vector<NamedTensor>& tensors) {
  nb::list rows;
  for (const NamedTensor& one : tensors) {
    rows.append(
        nb::make_tuple(
            one.name,
            static_cast<int>(one.scalar_type),
            to_tuple(one.sizes),
            one.nbytes,
            nb::cast(one.keys),
            nb::cast(one.aliases)));
  }
  return rows;
}

nb::list to_list(const std::vector<Error>& errors) {
  nb::list list;
  for (const Error& error : errors) {
    list.append(to_exception(error));
  }
  return list;
}

/// The bytes, the scalar type and the sizes of a tensor that has an owner.
nb::tuple to_row(const TensorView& view) {
  return nb::make_tuple(
      to_array(view.data, view.nbytes, view.owner), static_cast<int>(view.scalar_type), to_tuple(view.sizes));
}

nb::tuple value(const std::shared_ptr<Adapter>& adapter, const std::string& name) {
  TensorView view = AdapterAccess::value(*adapter, name);
  if (!view.owner) {
    view.owner = adapter;
  }
  return to_row(view);
}

/// What PEFT saved in a folder: alpha / r, what is known of its origin, and for each pair its module, its two keys with
/// their tensors as `value` gives them, and its scale.
nb::tuple read_peft(const RawText& path) {
  const auto folder = without_interpreter([&] { return internal::PeftFolder(path); });
  nb::list rows;
  for (const internal::PeftPair& pair : folder.pairs()) {
    rows.append(nb::make_tuple(pair.module, pair.a_key, to_row(pair.a), pair.b_key, to_row(pair.b), pair.scale));
  }
  return nb::make_tuple(folder.plain_scale(), folder.origin(), rows);
}

/// @returns the fingerprint, the number of keys, the size of the blobs, the named tensors, and what
///   `rotary_head_dim` gives.
nb::tuple describe_foundation(const std::vector<RawText>& paths) {
  std::string fingerprint;
  size_t keys = 0;
  uint64_t nbytes = 0;
  std::vector<NamedTensor> tensors;
  std::optional<int64_t> head_dim;
  {
    const WithoutInterpreter release;
    const auto files = internal::open_foundation({paths.begin(), paths.end()});
    const internal::Foundation foundation(internal::pointers(files), /*strict=*/true);
    fingerprint = foundation.fingerprint();
    keys = foundation.size();
    nbytes = internal::content_size(foundation);
    tensors = internal::named_tensors(internal::Index(foundation));
    head_dim = internal::rotary_head_dim(files);
  }
  return nb::make_tuple(fingerprint, keys, nbytes, to_list(tensors), head_dim);
}

/// What is wrong with tensors that are to become an adapter.
nb::list adapter_problems(const nb::list& rows, const RawText& path) {
  const PythonTensors tensors(rows);
  return to_list(internal::adapter_problems(path, tensors.views()));
}

/// @param source the path of an adapter, or rows of tensors.
std::unique_ptr<MergedAdapter> merge(
    nb::handle tensors,
    const nb::object& source,
    double alpha,
    std::optional<double> scale,
    const std::vector<std::pair<std::string, std::string>>& names,
    const nb::list& weights,
    bool tied) {
  const CacheTensors& on_cache = tensors_on_cache(tensors);
  const PythonTensors given(weights);
  const internal::MergeChoices choices{alpha, scale, {names.begin(), names.end()}, given.views(), tied};
  if (nb::isinstance<nb::bytes>(source)) {
    const RawText path = nb::cast<RawText>(source);
    const WithoutInterpreter release;
    return internal::merge_adapter(on_cache, path, choices);
  }
  const PythonTensors adapter(nb::cast<nb::list>(source));
  const WithoutInterpreter release;
  return internal::merge_adapter(on_cache, adapter.views(), choices);
}

/// @param rows pairs of a path and a strength.
std::vector<AdapterShare> shares_of(const nb::list& rows) {
  std::vector<AdapterShare> shares;
  for (const nb::handle item : rows) {
    const nb::tuple row = nb::cast<nb::tuple>(item);
    shares.push_back({nb::cast<RawText>(row[0]), nb::cast<double>(row[1])});
  }
  return shares;
}

/// @returns the scale, and each tensor by its name.
nb::tuple combine(const nb::list& rows, const std::optional<RawText>& like) {
  const std::vector<AdapterShare> shares = shares_of(rows);
  const auto made = without_interpreter([&] { return internal::combine_adapters(shares, like ? &*like : nullptr); });
  nb::list tensors;
  for (const auto& [key, view] : made.tensors) {
    tensors.append(nb::make_tuple(key, to_row(view)));
  }
  return nb::make_tuple(made.scale, tensors);
}

} // namespace

void add_adapters(nb::module_& module) {
  nb::class_<Adapter>(module, "Adapter")
      .def_static(
          "read",
          [](const RawText& path) {
            return std::const_pointer_cast<Adapter>(Adapter::read(path)); // no function of the class changes it
          },
          "path"_a,
          nb::call_guard<WithoutInterpreter>())
      .def_prop_ro("foundation", &Adapter::foundation)
      .def_prop_ro("scale", &Adapter::scale)
      .def_prop_ro("metadata", &Adapter::metadata)
      .def_prop_ro("tensors", [](const Adapter& adapter) { return to_list(adapter.tensors()); })
      .def_prop_ro(
          "pairs",
          [](const Adapter& adapter) {
            nb::list rows;
            for (const LoraPair& pair : adapter.pairs()) {
              rows.append(nb::make_tuple(pair.module, pair.a, pair.b, pair.rank, pair.in_features, pair.out_features));
            }
            return rows;
          })
      .def_prop_ro("nbytes", [](const Adapter& adapter) { return AdapterAccess::impl(adapter).nbytes(); })
      .def("unpaired", [](const Adapter& adapter) { return to_list(AdapterAccess::impl(adapter).unpaired); })
      .def("problems", [](const Adapter& adapter) { return to_list(adapter.problems()); })
      .def(
          "file",
          [](const std::shared_ptr<Adapter>& adapter) {
            const auto [data, size] = AdapterAccess::impl(*adapter).data_file().bytes();
            return to_array(data, size, adapter);
          })
      .def("value", &value, "name"_a);

  nb::class_<MergedAdapter>(module, "MergedAdapter")
      .def_prop_ro("weights", &MergedAdapter::weights)
      .def_prop_ro("generation", &MergedAdapter::generation)
      .def_prop_ro("undone", &MergedAdapter::undone)
      .def("undo", &MergedAdapter::undo, nb::call_guard<WithoutInterpreter>());

  module.def(
      "foundation_fingerprint",
      [](const std::vector<RawText>& paths) { return foundation_fingerprint({paths.begin(), paths.end()}); },
      "paths"_a,
      nb::call_guard<WithoutInterpreter>());
  module.def("read_peft", &read_peft, "path"_a);
  module.def("describe_foundation", &describe_foundation, "paths"_a);
  module.def("adapter_problems", &adapter_problems, "tensors"_a, "path"_a);
  module.def("weight_names", &internal::weight_names, "module"_a);
  module.def(
      "load_adapter",
      [](nb::handle tensors, const RawText& path, std::optional<double> program_scale, double strength) {
        const CacheTensors& on_cache = tensors_on_cache(tensors);
        return without_interpreter([&] { return internal::load_adapter(on_cache, path, {program_scale, strength}); });
      },
      "tensors"_a,
      "path"_a,
      "program_scale"_a.none(),
      "strength"_a);
  module.def(
      "set_adapter_strength",
      [](nb::handle tensors, double strength) {
        const CacheTensors& on_cache = tensors_on_cache(tensors);
        return without_interpreter([&] { return internal::set_adapter_strength(on_cache, strength); });
      },
      "tensors"_a,
      "strength"_a);
  module.def(
      "load_adapters",
      [](nb::handle tensors, const nb::list& shares, std::optional<double> program_scale) {
        const CacheTensors& on_cache = tensors_on_cache(tensors);
        const std::vector<AdapterShare> adapters = shares_of(shares);
        const WithoutInterpreter release;
        return internal::load_adapters(on_cache, adapters, program_scale);
      },
      "tensors"_a,
      "adapters"_a,
      "program_scale"_a.none());
  module.def(
      "set_adapter_strengths",
      [](nb::handle tensors, const std::vector<double>& strengths) {
        const CacheTensors& on_cache = tensors_on_cache(tensors);
        return without_interpreter([&] { return internal::set_adapter_strengths(on_cache, strengths); });
      },
      "tensors"_a,
      "strengths"_a);
  module.def("combine_adapters", &combine, "adapters"_a, "like"_a.none());
  module.def(
      "merge_adapter", &merge, "tensors"_a, "source"_a, "alpha"_a, "scale"_a.none(), "names"_a, "weights"_a, "tied"_a);
}

} // namespace blobstore::python
