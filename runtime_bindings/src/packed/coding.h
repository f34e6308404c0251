// Numbers, digests and texts one after the other, as files of packed weights have them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace blobstore::internal {

class Encoder {
 public:
  template <typename Value>
  void value(const Value& value) {
    put(&value, sizeof value);
  }
  void put(const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); }

  std::string bytes;
};

/// Reads what an Encoder wrote. What does not fit is read as zeros, and `whole` is false from then on.
class Decoder {
 public:
  Decoder(const uint8_t* data, uint64_t begin, uint64_t end) : data_(data), at_(begin), end_(end) {}

  template <typename Value>
  Value value() {
    Value value{};
    take(&value, sizeof value);
    return value;
  }
  void take(void* to, size_t size) {
    if (const std::string_view bytes = text(size); !bytes.empty()) {
      std::memcpy(to, bytes.data(), size);
    }
  }
  /// A part of what is read, without a copy.
  std::string_view text(uint64_t size) {
    whole_ = whole_ && size <= end_ - at_;
    if (!whole_) {
      return {};
    }
    at_ += size;
    return {reinterpret_cast<const char*>(data_ + at_ - size), static_cast<size_t>(size)};
  }
  bool whole() const { return whole_; }
  uint64_t at() const { return at_; }
  bool at_end() const { return at_ == end_; }

 private:
  const uint8_t* data_;
  uint64_t at_;
  uint64_t end_;
  bool whole_ = true;
};

} // namespace blobstore::internal
