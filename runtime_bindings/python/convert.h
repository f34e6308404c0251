// Conversion between Python's values and the library's, and the parts of the module.
#pragma once

#include <nanobind/nanobind.h>

#include <blobstore/error.h>
#include <blobstore/program.h>

namespace blobstore::internal {
class CacheTensors;
}

namespace blobstore::python {

namespace nb = nanobind;

/// Functions that the Python side lends for rare cases; see blobstore.runtime. Never freed, because the interpreter may
/// end first.
struct Helpers {
  nb::object as_bytes; // (object, layout) -> (buffer, layout), both in the order of the layout
  nb::object to_numpy; // (buffer, layout) -> array
  nb::object to_torch; // (buffer, layout) -> tensor
  nb::object make_error; // (kind, path, reason, number) -> exception
};
Helpers& helpers();

/// Paths and messages, which need not be UTF-8.
nb::bytes to_bytes(const std::string& text);
std::string to_string(const nb::bytes& bytes);

/// (scalar type, sizes, dim order), or None.
nb::object layout_object(const std::optional<Layout>& layout);
std::optional<Layout> layout_from(nb::handle object);

/// The arguments of a call, and the objects that keep their memory alive.
class Arguments {
 public:
  /// Use the memory of tensors and arrays in place, unless their order of dimensions differs from the method's.
  Arguments(const nb::args& values, const std::vector<ValueInfo>& inputs);
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  const std::vector<Argument>& list() const { return list_; }
  /// Whether an argument was a torch tensor; then the results must be tensors too.
  bool torch() const { return torch_; }

 private:
  bool take_torch(nb::handle value, const Layout* expected, Argument& out);
  bool take_buffer(nb::handle value, const Layout* expected, Argument& out);
  void take_other(nb::handle value, const ValueInfo* info, Argument& out);

  std::vector<Argument> list_;
  std::vector<Py_buffer> buffers_;
  std::vector<nb::object> kept_;
  bool torch_ = false;
};

/// A Python value for each result. Tensors and arrays own their memory.
nb::list to_python(std::vector<Value>&& values, bool torch);

/// The exception translator: throws what the Python side made of an Error.
void translate(const std::exception_ptr& pointer, void*);

/// What the Python side made of an Error.
nb::object to_exception(const Error& error);

/// The tensors on a cache behind an object of the module's class `Tensors`. Valid as long as the object.
const internal::CacheTensors& tensors_on_cache(nb::handle tensors);

// The parts of the module.
void add_adapters(nb::module_& module);
void add_cache(nb::module_& module);
void add_delegates(nb::module_& module);
void add_files(nb::module_& module);
void add_programs(nb::module_& module);
void add_tensors(nb::module_& module);

} // namespace blobstore::python
