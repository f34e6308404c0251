// The Python module. It translates names and types only: the library does the work, and blobstore.runtime.native gives
// it the shape that users see.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "interpreter.h"
#include "os/crash_point.h"

namespace blobstore::python {

using namespace nb::literals;

nb::object to_array(const uint8_t* data, size_t size, std::shared_ptr<const void> owner) {
  auto* pin = new std::shared_ptr<const void>(std::move(owner));
  nb::capsule capsule(pin, [](void* held) noexcept { delete static_cast<std::shared_ptr<const void>*>(held); });
  return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(data, {size}, capsule));
}

Buffers::~Buffers() {
  for (Py_buffer& buffer : held_) {
    PyBuffer_Release(&buffer);
  }
}

const Py_buffer* Buffers::get(nb::handle object, int flags) {
  Py_buffer& buffer = held_.emplace_front(); // its shape may point into itself
  if (PyObject_GetBuffer(object.ptr(), &buffer, flags) != 0) {
    held_.pop_front();
    return nullptr;
  }
  return &buffer;
}

const Py_buffer& Buffers::take(nb::handle object) {
  const Py_buffer* buffer = get(object, PyBUF_SIMPLE);
  if (buffer == nullptr) {
    throw nb::python_error();
  }
  return *buffer;
}

const Py_buffer* Buffers::take_shaped(nb::handle object) {
  const Py_buffer* buffer = get(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
  if (buffer == nullptr) {
    PyErr_Clear();
  }
  return buffer;
}

Helpers& helpers() {
  static auto* all = new Helpers;
  return *all;
}

nb::object layout_object(const std::optional<Layout>& layout) {
  if (!layout) {
    return nb::none();
  }
  return nb::make_tuple(static_cast<int>(layout->scalar_type), to_tuple(layout->sizes), to_tuple(layout->dim_order));
}

std::optional<Layout> layout_from(nb::handle object) {
  if (object.is_none()) {
    return std::nullopt;
  }
  const nb::tuple parts = nb::cast<nb::tuple>(object);
  return Layout{
      nb::cast<int8_t>(parts[0]), nb::cast<std::vector<int32_t>>(parts[1]), nb::cast<std::vector<uint8_t>>(parts[2])};
}

NB_MODULE(_native, module) {
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false); // objects that live until the interpreter ends are no leak
  Py_AtExit(&internal::end_backend_work); // daemon threads cannot begin calls any more, but may still be in one

  add_logs(module);

  module.def(
      "set_helpers",
      [](nb::object as_bytes,
         nb::object to_numpy,
         nb::object to_torch,
         nb::object make_error,
         nb::object other_shape,
         nb::object list_map,
         nb::object read_map) {
        helpers() = {
            std::move(as_bytes),
            std::move(to_numpy),
            std::move(to_torch),
            std::move(make_error),
            std::move(other_shape),
            std::move(list_map),
            std::move(read_map)};
      },
      "as_bytes"_a,
      "to_numpy"_a,
      "to_torch"_a,
      "make_error"_a,
      "other_shape"_a,
      "list_map"_a,
      "read_map"_a);
#ifdef BLOBSTORE_TEST_HOOKS
  module.def(
      "crash_at", [](int point) { internal::crash_point.store(point); }, "point"_a, "Die at this point; 0 for none.");
#endif
  add_adapters(module);
  add_packed(module);
  add_cache(module);
  add_delegates(module);
  add_files(module);
  add_llm_kernels();
  add_programs(module);
  add_releases(module);
  add_requests(module);
  add_training(module);
  add_tensors(module);
}

} // namespace blobstore::python
