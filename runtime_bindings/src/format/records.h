// Records: how the tensors of a model become the blobs that a delegate loads (schema/record.fbs). Lowering writes them.
// One blob, whose key begins with `metadata.blobstore.`, holds those of one delegate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace blobstore::internal {

/// What a step does; logical/steps.h says what each takes.
enum class Operation : uint8_t {
  Reshape = 1,
  Cast = 2,
  QuantizeTensor = 3,
  QuantizeChannel = 4,
  QuantizeGroup = 5,
  SwapInOut = 6,
  ChannelsLast = 7,
  PackInt4 = 8,
  FoldConvWeight = 9,
  FoldConvBias = 10,
  FoldLinearWeight = 11,
  FoldLinearBias = 12,
  NormWeight = 13,
  NormBias = 14,
};

/// For messages: "channels last".
const char* to_string(Operation operation);

/// One operation on the way from tensors to bytes.
struct Step {
  Operation operation = Operation::Reshape;
  std::vector<int64_t> ints;
  std::vector<double> floats;
  std::vector<std::string> names;

  bool operator==(const Step& other) const;
};

/// A tensor of the model.
struct SourceTensor {
  std::string name; // fully qualified
  int8_t scalar_type = 0; // in the model, as are the sizes; not checked, so sizes may be negative
  std::vector<int64_t> sizes;
  std::vector<std::string> aliases; // other names of the same tensor
};

/// How one blob is made; or, with a refusal, tensors that cannot be changed.
struct Record {
  std::string key; // of the blob; empty with a refusal
  uint64_t nbytes = 0; // of the blob
  std::vector<SourceTensor> sources; // that the first step takes
  std::vector<Step> steps;
  uint32_t group = 0; // blobs of one delegate with the same number are packed together
  std::string refusal; // why the sources cannot be changed
  bool auxiliary = false; // whether no state dict has the sources
  // Of scales that a bias is quantized with, otherwise empty: the key of the scales of the weight beside it, and the
  // scale of the activations. The blob holds the products of the two in float32.
  std::string product_of;
  double factor = 0;
};

/// The records of one delegate.
struct Records {
  std::string inner; // the backend whose layouts they describe
  std::vector<Record> records;
  std::vector<SourceTensor> outside; // tensors of the program that no delegate has
  std::vector<std::string> shared; // names of tensors that a delegate has and the program itself uses, too
  std::vector<std::string> transient; // names of those outside that no state dict has
};

/// The refusal of a buffer that a method changes, such as a key/value cache.
constexpr char kStateRefusal[] =
    "it is not a weight but state, which the program keeps in its own memory and changes itself";

/// Whether a blob holds records.
bool is_records(std::string_view key, const uint8_t* data, size_t size);

/// The key of a blob of records, which is made of the digest of its bytes.
std::string records_key(const uint8_t* data, size_t size);

/// Read a blob of records.
///
/// @param origin the file or the cache that it comes from, for messages.
/// @throws Error InvalidFile: it is damaged, or of a later version.
Records parse_records(const uint8_t* data, size_t size, const std::string& origin);

} // namespace blobstore::internal
