// Writing a .ptd: the table of contents first, then each blob once, straight from its memory. See docs/format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/layout.h>

#include "format/digest.h"
#include "os/output_file.h"

namespace blobstore::internal {

/// The contents of a new file. Keeps views of keys, layouts and blobs, whose memory must stay as it is until the file
/// is written. Takes memory for each key, and none for bytes of blobs.
class PtdWriter {
 public:
  /// @param share store blobs with equal bytes once. Otherwise every key has its own bytes.
  /// @param check_sources called before bytes are read, at least once for each piece that is written; throws if they
  ///   may be lost, because a file that they are mapped from was truncated.
  PtdWriter(bool share, std::function<void()> check_sources);

  /// Add a key. The caller checks that it is new.
  ///
  /// @param alignment the blob's offset in the file will be a multiple of this.
  /// @throws Error InvalidKey, InvalidAlignment, or what `check_sources` throws.
  void add(
      std::string_view key, const std::optional<Layout>& layout, uint32_t alignment, const uint8_t* data, size_t size);
  /// Ask for a larger alignment of a key that was added; its number counts from 0. The key gets the least common
  /// multiple of both. @throws Error InvalidAlignment.
  void align(size_t number, uint32_t alignment);
  /// The digest of the blob of a key.
  const Digest& digest_of(size_t number) const { return blobs_[keys_[number].blob].digest; }

  /// Write everything to an empty file; does not commit it. The result depends on nothing but what was added.
  ///
  /// @param metadata text for the manifest.
  /// @returns the size of the file in bytes.
  /// @throws Error DataChanged: bytes changed since they were added. InvalidAlignment: the common multiple of all
  ///   alignments is too large. FileAccess, Unsupported, or what `check_sources` throws.
  uint64_t write(OutputFile& file, const std::map<std::string, std::string>& metadata = {}) const;

 private:
  struct Key {
    std::string_view key;
    const std::optional<Layout>* layout;
    uint32_t alignment;
    uint32_t blob;
  };
  struct Blob {
    const uint8_t* data;
    size_t size;
    Digest digest;
    uint64_t alignment; // of all its keys
    std::string_view key; // the first of them
  };

  uint32_t find_or_add(const Blob& blob);
  void copy(OutputFile& file, const Blob& blob, std::vector<uint8_t>& piece) const;
  [[noreturn]] void refuse_alignments() const;

  bool share_;
  std::function<void()> check_sources_;
  std::vector<Key> keys_;
  std::vector<Blob> blobs_;
  std::multimap<Digest, uint32_t> by_digest_;
};

} // namespace blobstore::internal
