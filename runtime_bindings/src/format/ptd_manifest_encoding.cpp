// The manifest. A flatbuffer builder works from back to front: an object is written before those that refer to it, and
// positions count from the end.
#include <algorithm>
#include <array>
#include <cstring>

#include "format/ptd_encoding.h"

namespace blobstore::internal {
namespace {

class Builder {
 public:
  /// How far the first byte so far is from the end.
  uint32_t position() const { return static_cast<uint32_t>(reversed_.size()); }

  /// Pad, so that after `more` bytes a number of this size is aligned.
  void align(size_t size, size_t more = 0) {
    largest_ = std::max(largest_, size);
    reversed_.resize(reversed_.size() + (~(reversed_.size() + more) + 1) % size, 0);
  }
  void bytes(const void* data, size_t size) {
    const auto* first = static_cast<const uint8_t*>(data);
    reversed_.insert(reversed_.end(), std::make_reverse_iterator(first + size), std::make_reverse_iterator(first));
  }
  template <typename Number>
  void number(Number value) {
    align(sizeof value);
    bytes(&value, sizeof value);
  }
  void reference(uint32_t target) {
    align(4);
    number(position() - target + 4);
  }

  uint32_t string(std::string_view text) {
    align(4, text.size() + 1);
    reversed_.push_back(0);
    bytes(text.data(), text.size());
    number(static_cast<uint32_t>(text.size()));
    return position();
  }
  /// A vector of objects that are written as bytes.
  uint32_t vector(const void* data, size_t item, size_t count) {
    align(4, item * count);
    bytes(data, item * count);
    number(static_cast<uint32_t>(count));
    return position();
  }
  uint32_t vector(const std::vector<uint32_t>& targets) {
    align(4, 4 * targets.size());
    for (auto target = targets.rbegin(); target != targets.rend(); ++target) {
      reference(*target);
    }
    number(static_cast<uint32_t>(targets.size()));
    return position();
  }

  /// Write what ends a table, whose fields are written already. Tables of one shape share a vtable.
  ///
  /// @param end the position before the first field was written.
  /// @param fields their positions, by slot.
  template <size_t Count>
  uint32_t table(uint32_t end, const std::array<uint32_t, Count>& fields) {
    number(int32_t{0}); // the distance to the vtable, set below
    const uint32_t at = position();
    std::vector<uint16_t> vtable{static_cast<uint16_t>(2 * (Count + 2)), static_cast<uint16_t>(at - end)};
    for (const uint32_t field : fields) {
      vtable.push_back(static_cast<uint16_t>(at - field));
    }
    if (vtable != vtable_) {
      vtable_ = vtable;
      for (auto entry = vtable.rbegin(); entry != vtable.rend(); ++entry) {
        number(*entry);
      }
      vtable_at_ = position();
    }
    const auto distance = static_cast<int32_t>(vtable_at_ - at);
    for (size_t i = 0; i < sizeof distance; ++i) {
      reversed_[at - 1 - i] = static_cast<uint8_t>(static_cast<uint32_t>(distance) >> 8 * i);
    }
    return at;
  }

  std::vector<uint8_t> finish(uint32_t root, const char* identifier) {
    align(largest_, 8);
    bytes(identifier, 4);
    reference(root);
    std::reverse(reversed_.begin(), reversed_.end());
    return std::move(reversed_);
  }

 private:
  std::vector<uint8_t> reversed_; // the last byte first
  size_t largest_ = 1;
  std::vector<uint16_t> vtable_; // the last one; equal tables follow each other here
  uint32_t vtable_at_ = 0;
};

} // namespace

std::vector<uint8_t> encode_manifest(
    const Digest& head,
    const std::vector<Digest>& digests,
    const std::vector<uint32_t>& alignments,
    const std::map<std::string, std::string>& metadata) {
  Builder builder;
  std::vector<uint32_t> pairs;
  for (const auto& [key, value] : metadata) {
    const uint32_t key_at = builder.string(key);
    const uint32_t value_at = builder.string(value);
    const uint32_t end = builder.position();
    std::array<uint32_t, 2> fields{};
    builder.reference(key_at);
    fields[0] = builder.position();
    builder.reference(value_at);
    fields[1] = builder.position();
    pairs.push_back(builder.table(end, fields));
  }
  const uint32_t metadata_at = builder.vector(pairs);
  const uint32_t alignments_at = builder.vector(alignments.data(), sizeof(uint32_t), alignments.size());
  const uint32_t digests_at = builder.vector(digests.data(), sizeof(Digest), digests.size());
  const uint32_t end = builder.position();
  std::array<uint32_t, 5> fields{};
  builder.number(uint32_t{0}); // version
  fields[0] = builder.position();
  builder.bytes(head.data(), head.size());
  fields[1] = builder.position();
  const uint32_t references[] = {digests_at, alignments_at, metadata_at};
  for (size_t i = 0; i < std::size(references); ++i) {
    builder.reference(references[i]);
    fields[2 + i] = builder.position();
  }
  std::vector<uint8_t> out = builder.finish(builder.table(end, fields), "BM01");
  const uint64_t length = out.size();
  const Digest sum = digest(out.data(), out.size());
  out.insert(out.end(), sum.begin(), sum.end());
  const auto* raw = reinterpret_cast<const uint8_t*>(&length);
  out.insert(out.end(), raw, raw + sizeof length);
  for (const char letter : std::string_view("BLOBMAN1")) {
    out.push_back(static_cast<uint8_t>(letter));
  }
  return out;
}

} // namespace blobstore::internal
