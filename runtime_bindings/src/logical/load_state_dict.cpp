#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <executorch/runtime/core/exec_aten/util/tensor_dimension_limit.h>

#include <blobstore/error.h>
#include <blobstore/tensors.h>

#include "format/file_kind.h"
#include "format/ptd_file.h"
#include "format/safetensors.h"
#include "logical/tensor_over.h"
#include "os/file.h"
#include "os/text.h"

namespace blobstore BLOBSTORE_API {

using namespace internal;
namespace {

using executorch::extension::TensorPtr;

/// @param owner keeps the bytes alive.
TensorPtr make_tensor(
    const std::string& path,
    const std::string& name,
    const Layout& layout,
    uint8_t* data,
    size_t size,
    std::shared_ptr<void> owner) {
  if (layout.sizes.size() > executorch::runtime::kTensorDimensionLimit) {
    throw_error_in(
        ErrorKind::UnsupportedData,
        path,
        "tensor '{}' has {} dimensions, ExecuTorch has up to {}",
        name,
        layout.sizes.size(),
        executorch::runtime::kTensorDimensionLimit);
  }
  std::vector<int64_t> in_memory;
  for (const uint8_t dim : layout.dim_order) {
    in_memory.push_back(layout.sizes[dim]);
  }
  if (!has_room_for_strides(in_memory)) {
    throw_error_in(
        ErrorKind::UnsupportedData,
        path,
        "tensor '{}', {}, has strides above 2**31-1, which ExecuTorch has not",
        name,
        to_string(layout));
  }
  return tensor_over(
      {layout.scalar_type, {layout.sizes.begin(), layout.sizes.end()}, data, size, std::move(owner)}, layout.dim_order);
}

StateDict load_ptd(const std::string& path) {
  const auto file = std::make_shared<PtdFile>(path, Mapping::Kind::Private);
  file->verify();
  StateDict tensors;
  for (size_t i = 0; i < file->size(); ++i) {
    const PtdEntry& entry = file->entry(i);
    if (entry.layout) {
      const SourceBlob blob = file->blob(i);
      auto* data = const_cast<uint8_t*>(blob.data); // its pages are a private copy
      tensors.emplace(entry.key, make_tensor(path, entry.key, *entry.layout, data, blob.size, file));
    }
  }
  return tensors;
}

StateDict load_safetensors(const std::string& path) {
  const File file(path, /*writable=*/false);
  const uint64_t size = file.size();
  const auto map = std::make_shared<Mapping>(file, 0, static_cast<size_t>(size), Mapping::Kind::Private);
  const SafetensorsTable table = read_safetensors(path, map->data(), size);
  StateDict tensors;
  for (const SafetensorsEntry& entry : table.entries) {
    if (!entry.layout) {
      throw_error_in(
          ErrorKind::UnsupportedData,
          path,
          "tensor '{}' is {} or too large, ExecuTorch has no such tensors",
          entry.key,
          entry.dtype);
    }
    const auto nbytes = static_cast<size_t>(entry.end - entry.start);
    tensors.emplace(entry.key, make_tensor(path, entry.key, *entry.layout, map->data() + entry.start, nbytes, map));
  }
  return tensors;
}

} // namespace

StateDict load_state_dict(const std::string& path) {
  const FileKind kind = file_kind(path);
  if (kind == FileKind::Data) {
    return load_ptd(path);
  }
  // blanks may come before the brace by which a .safetensors is recognized
  if (kind == FileKind::Safetensors || (kind == FileKind::Unknown && ends_with(path, ".safetensors"))) {
    return load_safetensors(path);
  }
  throw_error_in(ErrorKind::InvalidFile, path, "this is neither a .ptd data file nor a .safetensors file");
}

} // namespace blobstore
