// How packed bytes follow from stored bytes, for all weights of one shape and kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace blobstore::internal {

/// A weight, its bias, and its scales: whose bytes go into a packed weight. The caller owns the memory.
struct PackedSource {
  const uint8_t* data = nullptr;
  size_t size = 0; // in bytes
};
using PackedSources = std::vector<PackedSource>;

/// A map from the bytes of sources to packed bytes. It was learned by packing numbers, and nothing is assumed of what
/// it looks like; a map that, applied to other weights, gives what XNNPACK makes of them is used for these.
class PackedMap {
 public:
  /// What a run of packed bytes holds.
  enum class Kind : uint8_t {
    Word, // 4 bytes of a source
    Byte, // 1 byte of a source
    MinusSum, // the sum of int8 of a source, negative, as int32: for XNNPACK's own kernels
    Sum, // the same, not negative: for Arm's
  };

  /// Steps through packed and stored bytes, the innermost first.
  struct Dim {
    uint64_t count = 0;
    int64_t to = 0; // in packed bytes
    int64_t from = 0; // in bytes of the source
  };

  /// Runs within runs.
  struct Nest {
    Kind kind = Kind::Word;
    uint8_t source = 0;
    uint64_t to = 0; // of its first element, in packed bytes
    uint64_t from = 0; // in bytes of the source
    uint64_t terms = 0; // of each sum
    std::vector<Dim> dims;
  };

  /// What makes the packed bytes of some sources, as many as the sources of the map, each as large as there.
  /// @returns empty if they cannot be packed.
  using Pack = std::function<std::optional<std::vector<uint8_t>>(const std::vector<std::vector<uint8_t>>&)>;

  /// Find the map, by packing numbers. @param sizes of the sources, the weight first; 0 for one that is missing.
  /// @returns empty if none is found.
  static std::optional<PackedMap> learn(const std::vector<size_t>& sizes, const Pack& pack);

  /// Whether the sources behind the bias are scales of integers.
  bool has_scales() const;
  /// The size of the packed bytes.
  size_t size() const { return size_; }
  /// Write the packed bytes. @param packed `size` bytes, all zero.
  void apply(const PackedSources& sources, uint8_t* packed) const;
  /// Write those that are made of sources that changed; if they are many, past the caches of the processor.
  /// @param packed what the map gives of the others.
  void update(const PackedSources& sources, const std::vector<bool>& changed, uint8_t* packed) const;
  /// Whether these packed bytes are made of these sources, as the map says.
  bool gives(const PackedSources& sources, const uint8_t* packed, size_t size) const;

  std::string encode() const;
  /// @param text what `encode` returned, which may be damaged. @returns empty if it is no map.
  static std::optional<PackedMap> decode(const uint8_t* data, size_t size);
  /// Whether it can be applied to sources of these sizes.
  bool fits(const std::vector<size_t>& sizes, size_t packed) const;

 private:
  struct Element;
  struct Int8;
  static std::optional<PackedMap> learn_floats(const std::vector<size_t>& sizes, const Pack& pack);
  static std::optional<PackedMap> learn_int8(const std::vector<size_t>& sizes, const Pack& pack);
  bool is_right(const std::vector<size_t>& sizes, const Pack& pack) const;
  void add(const std::vector<Element>& elements, Kind kind, uint8_t source, uint64_t terms);
  void write(const PackedSources& sources, const std::vector<bool>& changed, uint8_t* packed, bool streamed) const;

  size_t size_ = 0;
  std::vector<Nest> nests_;
};

/// Floats to try a map on, with random bits, which are all different: the same in each process, so that a map is found
/// everywhere or nowhere.
class TestNumbers {
 public:
  /// @param negative whether half of them are.
  void fill(std::vector<uint8_t>& bytes, bool negative);

 private:
  uint32_t next();
  uint64_t state_ = 1;
};

} // namespace blobstore::internal
