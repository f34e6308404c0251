#include "program/program_parts.h"

#include <cstring>

#include <blobstore/error.h>

#include "format/flatbuffer.h"
#include "format/utf8.h"
#include "program/program_schema.h"

namespace blobstore::internal {
namespace {

class Reader {
 public:
  Reader(ProgramParts& parts, const uint8_t* data, size_t size, size_t program_size, uint64_t segment_base)
      : parts_(parts), buffer_(data, program_size), data_(data), size_(size), segment_base_(segment_base) {}

  void read() {
    const uint64_t root = buffer_.root();
    segments_ = buffer_.vector(root, kSegments, 4);
    payloads_ = buffer_.vector(root, kInlinePayloads, 4);
    const FlatVector plans = buffer_.vector(root, kPlans, 4);
    for (uint32_t i = 0; i < plans.count; ++i) {
      read_method(buffer_.element(plans, i));
    }
    const FlatVector named = buffer_.vector(root, kNamedData, 4);
    for (uint32_t i = 0; i < named.count; ++i) {
      const uint64_t blob = buffer_.element(named, i);
      parts_.named_data.emplace(text(blob, 0), segment(buffer_.u32_field(blob, 1)));
    }
  }

 private:
  void read_method(uint64_t plan) {
    const std::string method = text(plan, kName);
    parts_.methods.push_back(method);
    const FlatVector values = buffer_.vector(plan, kValues, 4);
    for (uint32_t i = 0; i < values.count; ++i) {
      const uint64_t value = buffer_.element(values, i);
      if (buffer_.u8_field(value, kValueType) == kTensorType) {
        if (const uint64_t tensor = buffer_.object(value, kValue); tensor != 0) {
          read_tensor(method, tensor);
        }
      }
    }
    const FlatVector delegates = buffer_.vector(plan, kDelegates, 4);
    for (uint32_t i = 0; i < delegates.count; ++i) {
      read_delegate(method, buffer_.element(delegates, i));
    }
  }

  void read_tensor(const std::string& method, uint64_t tensor) {
    const uint64_t extra = buffer_.object(tensor, kExtra);
    const bool is_external = extra != 0 && buffer_.u8_field(extra, kLocation) == kExternal;
    const uint32_t number = buffer_.u32_field(tensor, kDataBuffer);
    const bool is_planned = buffer_.field(tensor, kAllocation, 4) != 0;
    if (is_external) {
      parts_.externals.push_back({text(extra, kFqn), method, tensor_layout(buffer_, tensor), is_planned});
    } else if (number != 0 && !is_planned && buffer_.u32_field(tensor, kStorageOffset) == 0) {
      if (std::optional<Layout> layout = tensor_layout(buffer_, tensor)) {
        parts_.constants.emplace(number, ProgramParts::Constant{method, std::move(*layout)});
      }
    }
  }

  void read_delegate(const std::string& method, uint64_t delegate) {
    const uint64_t processed = buffer_.object(delegate, 1);
    if (processed == 0) {
      throw_format_error("a delegate has no payload");
    }
    const uint32_t number = buffer_.u32_field(processed, 1);
    parts_.delegates.push_back(
        {method, text(delegate, 0), buffer_.u8_field(processed, 0) == 1 ? segment(number) : inline_payload(number)});
  }

  Part inline_payload(uint32_t number) const {
    if (number >= payloads_.count) {
      throw_format_error("payload {} is out of range", number);
    }
    const FlatVector bytes = buffer_.vector(buffer_.element(payloads_, number), 0, 1);
    return {data_ + bytes.start, bytes.count};
  }

  Part segment(uint32_t number) const {
    if (number >= segments_.count) {
      throw_format_error("segment {} is out of range", number);
    }
    const uint64_t table = buffer_.element(segments_, number);
    const uint64_t offset = buffer_.u64_field(table, 0);
    const uint64_t size = buffer_.u64_field(table, 1);
    if (offset > size_ - segment_base_ || size > size_ - segment_base_ - offset) {
      throw_format_error("segment {} reaches beyond the end of the file", number);
    }
    return {data_ + segment_base_ + offset, size};
  }

  std::string text(uint64_t table, unsigned field) const {
    const std::string_view found = buffer_.string(table, field);
    if (!is_utf8(found)) {
      throw_format_error("a name is not valid UTF-8");
    }
    return std::string(found);
  }

  ProgramParts& parts_;
  FlatBuffer buffer_;
  const uint8_t* data_;
  uint64_t size_;
  uint64_t segment_base_;
  FlatVector segments_;
  FlatVector payloads_;
};

} // namespace

ProgramParts read_program_parts(const std::string& path, const uint8_t* data, size_t size) {
  ProgramParts parts;
  parts.path = path;
  try {
    if (size < 40 || std::memcmp(data + 4, "ET12", 4) != 0) {
      throw_format_error("not a program");
    }
    uint64_t program_size = size;
    uint64_t segment_base = 0;
    if (std::memcmp(data + 8, "eh00", 4) == 0) {
      std::memcpy(&program_size, data + kProgramSizeAt, 8);
      std::memcpy(&segment_base, data + kProgramSizeAt + 8, 8);
    }
    if (program_size > size || segment_base > size) {
      throw_format_error("truncated");
    }
    Reader(parts, data, size, program_size, segment_base).read();
  } catch (const FormatError& error) {
    throw_error_in(ErrorKind::InvalidFile, path, "{}", error.what());
  }
  return parts;
}

} // namespace blobstore::internal
