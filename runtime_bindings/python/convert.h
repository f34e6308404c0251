// Between Python's values and the library's.
#pragma once

#include <nanobind/nanobind.h>

#include <blobstore/program.h>

namespace blobstore::python {

namespace nb = nanobind;

/// What the Python side lends for rare cases; see blobstore/runtime.py. Never freed: the interpreter may be gone first.
struct Helpers {
  nb::object as_bytes; // (object, layout) -> (buffer, layout), both in the order of the layout
  nb::object to_numpy; // (buffer, layout) -> array
  nb::object to_torch; // (buffer, layout) -> tensor
  nb::object make_error; // (kind, path, reason, number) -> exception
};
Helpers& helpers();

/// (scalar type, sizes, dim order), or None.
nb::object layout_object(const std::optional<Layout>& layout);
std::optional<Layout> layout_from(nb::handle object);

/// Arguments of a call, with what keeps their memory alive.
class Arguments {
 public:
  /// Take memory of tensors and arrays as it is, unless its order is another than the method's.
  Arguments(const nb::args& values, const std::vector<ValueInfo>& inputs);
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  const std::vector<Argument>& list() const { return list_; }
  /// Whether there was a torch tensor, so that results are to be tensors too.
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

/// A Python value for each result; tensors own their memory.
nb::list to_python(std::vector<Value>&& values, bool torch);

/// The module torch, if somebody imported it.
nb::handle torch_module();

} // namespace blobstore::python
