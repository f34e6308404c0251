// Gives ExecuTorch a program image.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <executorch/runtime/core/data_loader.h>

#include "program/program_image.h"

namespace blobstore::internal {

/// A DataLoader of the bytes of an image, which it does not own.
class ImageLoader final : public executorch::runtime::DataLoader {
 public:
  explicit ImageLoader(const ProgramImage& image) : image_(image) {}

  executorch::runtime::Result<executorch::runtime::FreeableBuffer> load(
      size_t offset, size_t size, const SegmentInfo& info) const override {
    if (info.segment_type == SegmentInfo::Type::Program) {
      if (offset > image_.flatbuffer_size() || size > image_.flatbuffer_size() - offset) {
        return executorch::runtime::Error::InvalidProgram;
      }
      return executorch::runtime::FreeableBuffer(
          reinterpret_cast<const uint8_t*>(image_.flatbuffer().data()) + offset, size, nullptr);
    }
    if (offset == kBoundConstants && image_.constants() != nullptr) {
      return executorch::runtime::FreeableBuffer(image_.constants(), image_.constants_size(), nullptr);
    }
    if (offset > image_.file_size() || size > image_.file_size() - offset) {
      return executorch::runtime::Error::InvalidProgram;
    }
    return executorch::runtime::FreeableBuffer(image_.whole().data() + offset, size, nullptr);
  }

  executorch::runtime::Error load_into(
      size_t offset, size_t size, const SegmentInfo& info, void* buffer) const override {
    executorch::runtime::Result<executorch::runtime::FreeableBuffer> found = load(offset, size, info);
    if (!found.ok()) {
      return found.error();
    }
    std::memcpy(buffer, found->data(), size);
    return executorch::runtime::Error::Ok;
  }

  executorch::runtime::Result<size_t> size() const override {
    return std::max<size_t>(image_.file_size(), image_.flatbuffer_size());
  }

 private:
  const ProgramImage& image_;
};

} // namespace blobstore::internal
