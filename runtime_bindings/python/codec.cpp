// How blobs are stored: what blobstore.core.codec.blobs uses for chunks where this module is there.
#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "codec/decoder.h"
#include "codec/streams.h"
#include "format/format_error.h"

namespace nb = nanobind;

namespace blobstore::internal {
namespace {

using namespace nb::literals;

/// The contiguous bytes of an object. The interpreter must be held when this is made and destroyed.
class Buffer {
 public:
  explicit Buffer(nb::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) != 0) {
      throw nb::python_error();
    }
  }
  ~Buffer() { PyBuffer_Release(&buffer_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* data() const { return static_cast<uint8_t*>(buffer_.buf); }
  size_t size() const { return static_cast<size_t>(buffer_.len); }

 private:
  Py_buffer buffer_;
};

Encoding chunk_encoding(const std::string& text) {
  const std::optional<Encoding> encoding = read_encoding(text);
  if (!encoding || encoding->kind == Encoding::Kind::Raw) {
    throw nb::value_error(("no encoding of chunks: " + text).c_str());
  }
  return *encoding;
}

/// The base of a chunk, checked; null for an encoding without one.
const uint8_t* base_of(const Encoding& encoding, const std::optional<Buffer>& base, size_t size) {
  if (size > kChunk) {
    throw nb::value_error("a chunk has at most 1048576 bytes");
  }
  if (encoding.kind != Encoding::Kind::Near) {
    return nullptr;
  }
  if (!base || base->size() != size) {
    throw nb::value_error("a base of another size than the chunk");
  }
  return base->data();
}

nb::list split_chunk(nb::handle chunk, const std::string& text, nb::handle base) {
  thread_local ChunkSplitter splitter;
  const Encoding encoding = chunk_encoding(text);
  const Buffer from(chunk);
  std::optional<Buffer> other;
  if (!base.is_none()) {
    other.emplace(base);
  }
  const uint8_t* of_base = base_of(encoding, other, from.size());
  const std::vector<Bytes>* streams = nullptr;
  {
    const nb::gil_scoped_release release;
    streams = &splitter.split(encoding, {from.data(), from.size()}, of_base);
  }
  nb::list all;
  for (const Bytes& stream : *streams) {
    all.append(nb::bytes(reinterpret_cast<const char*>(stream.data), stream.size));
  }
  return all;
}

void decode_chunk(nb::handle body, const std::string& text, nb::handle base, nb::handle out) {
  thread_local ChunkDecoder decoder;
  const Encoding encoding = chunk_encoding(text);
  const Buffer from(body);
  const Buffer to(out, PyBUF_WRITABLE);
  std::optional<Buffer> other;
  if (!base.is_none()) {
    other.emplace(base);
  }
  const uint8_t* of_base = base_of(encoding, other, to.size());
  try {
    const nb::gil_scoped_release release;
    decoder.decode(encoding, {from.data(), from.size()}, of_base, to.data(), to.size());
  } catch (const FormatError& error) {
    throw nb::value_error(error.what());
  }
}

} // namespace
} // namespace blobstore::internal

NB_MODULE(_codec, module) {
  using namespace nb::literals;
  module.attr("version") = BLOBSTORE_VERSION;
  module.def("split_chunk", &blobstore::internal::split_chunk, "chunk"_a, "encoding"_a, "base"_a.none());
  module.def("decode_chunk", &blobstore::internal::decode_chunk, "body"_a, "encoding"_a, "base"_a.none(), "out"_a);
}
