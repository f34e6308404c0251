// Where blobs are looked up by key: a cache, one opened file, or buffers of Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <blobstore/layout.h>

namespace blobstore::internal {

/// The bytes and the layout of a blob. Valid as long as its source.
struct SourceBlob {
  const uint8_t* data = nullptr;
  size_t size = 0;
  const std::optional<Layout>* layout = nullptr; // never null; empty for opaque bytes
};

class BlobSource {
 public:
  virtual ~BlobSource() = default;
  /// The files, for messages.
  virtual const std::string& name() const = 0;
  virtual size_t size() const = 0;
  /// A key, in the order of the files. Valid as long as the source.
  virtual std::string_view key(size_t index) const = 0;
  /// The blob under a key, if any.
  virtual std::optional<SourceBlob> find(std::string_view key) const = 0;
  bool contains(std::string_view key) const { return find(key).has_value(); }
  /// While the result lives, no bytes change. Empty where they never do.
  virtual std::shared_ptr<const void> hold() const { return nullptr; }
};

} // namespace blobstore::internal
