#include "packed/stock_graph.h"

#include <cstring>
#include <unordered_map>

#include "format/flatbuffer.h"

namespace blobstore::internal {
namespace {

constexpr size_t kGraphHeader = 18; // up to where it says how long the flatbuffer is

// Numbers of fields and types in xnnpack/serialization/schema.fbs of ExecuTorch.
enum GraphField { kGraphNodes = 1, kGraphValues = 2, kGraphConstants = 8 };
enum UnionField { kType = 0, kTable = 1 };
enum NodeType { kLinear = 2, kConv = 7, kDepthwise = 13, kTransposed = 39 };
enum ValueType { kPlain = 1, kQuantized = 2 };
enum QuantizedField { kTensor = 0, kQuantType = 1, kQuant = 2 };
enum TensorField { kDatatype = 0, kDims = 2, kConstant = 3, kId = 6 };
enum ConstantField { kKey = 2 };

/// Where an operator has its values; what lies before its input, and behind its output, are numbers.
struct OperatorFields {
  unsigned input;
  unsigned filter;
  unsigned bias;
  unsigned output;
  unsigned count;
};
constexpr OperatorFields kLinearFields{0, 1, 2, 3, 5};
constexpr OperatorFields kConvFields{15, 16, 17, 18, 20};

class Graph {
 public:
  Graph(const uint8_t* data, size_t size) : buffer_(data, size), root_(buffer_.root()) {
    constants_ = buffer_.vector(root_, kGraphConstants, 4);
    const FlatVector values = buffer_.vector(root_, kGraphValues, 4);
    for (uint32_t i = 0; i < values.count; ++i) {
      note_value(buffer_.element(values, i));
    }
  }

  bool note(PackedWays& ways) const {
    bool one_way = true;
    const FlatVector nodes = buffer_.vector(root_, kGraphNodes, 4);
    for (uint32_t i = 0; i < nodes.count; ++i) {
      const uint64_t node = buffer_.element(nodes, i);
      const uint8_t type = buffer_.u8_field(node, kType);
      if (type == kLinear || type == kConv || type == kDepthwise || type == kTransposed) {
        const OperatorFields& fields = type == kLinear ? kLinearFields : kConvFields;
        one_way = note_operator(type, buffer_.object(node, kTable), fields, ways) && one_way;
      }
    }
    return one_way;
  }

 private:
  struct Value {
    std::string key; // of its bytes, if they are constant
    std::string about;
  };

  void put(std::string& text, uint32_t number) const { text.append(reinterpret_cast<const char*>(&number), 4); }

  std::string key_of(uint32_t constant) const {
    if (constant >= constants_.count) {
      throw_format_error("constant {} is out of range", constant);
    }
    return constant == 0 ? std::string() : std::string(buffer_.string(buffer_.element(constants_, constant), kKey));
  }

  void note_value(uint64_t xvalue) {
    const uint64_t value = buffer_.object(xvalue, kTable);
    const bool quantized = buffer_.u8_field(xvalue, kType) == kQuantized;
    const uint64_t tensor = quantized ? buffer_.object(value, kTensor) : value;
    Value& noted = values_[buffer_.u32_field(tensor, kId)];
    const uint64_t datatype = buffer_.field(tensor, kDatatype, 2);
    put(noted.about, datatype == 0 ? 0 : buffer_.u16(datatype));
    if (const uint32_t constant = buffer_.u32_field(tensor, kConstant)) {
      noted.key = key_of(constant);
      const FlatVector dims = buffer_.vector(tensor, kDims, 4);
      noted.about.append(reinterpret_cast<const char*>(buffer_.data() + dims.start), size_t{4} * dims.count);
    }
    if (quantized) {
      note_quantization(buffer_.u8_field(value, kQuantType), buffer_.object(value, kQuant), noted.about);
    }
  }

  /// All that it has: numbers, the key of a constant with scales, or scales.
  void note_quantization(uint8_t type, uint64_t quant, std::string& about) const {
    constexpr unsigned kPerChannel = 1;
    constexpr unsigned kPerGroup = 4;
    put(about, type);
    if (quant == 0) {
      return;
    }
    const bool has_scales = type == kPerChannel || type == kPerGroup;
    const unsigned scales = type == kPerChannel ? 2 : 4; // the number of their constant
    for (unsigned slot = has_scales ? 1 : 0; slot < buffer_.field_count(quant); ++slot) {
      if (!has_scales || (slot != scales && (type == kPerChannel || slot != 3))) {
        put(about, buffer_.u32_field(quant, slot));
      }
    }
    if (has_scales) {
      about += key_of(buffer_.u32_field(quant, scales));
      const FlatVector inside = buffer_.vector(quant, 0, 4);
      about.append(reinterpret_cast<const char*>(buffer_.data() + inside.start), size_t{4} * inside.count);
    }
  }

  bool note_operator(uint8_t type, uint64_t table, const OperatorFields& fields, PackedWays& ways) const {
    std::string name;
    std::string way;
    put(way, type);
    for (unsigned slot = 0; slot < fields.count; ++slot) {
      const uint32_t number = buffer_.u32_field(table, slot);
      if (slot < fields.input || slot > fields.output) {
        put(way, number);
        continue;
      }
      const auto value = values_.find(number); // there may be no bias
      way += value == values_.end() ? "none" : value->second.about;
      way += '\0';
      if (value != values_.end() && (slot == fields.filter || (slot == fields.bias && !name.empty()))) {
        name += value->second.key;
      }
    }
    return name.empty() || ways.emplace(std::move(name), way).first->second == way;
  }

  FlatBuffer buffer_;
  uint64_t root_;
  FlatVector constants_;
  std::unordered_map<uint32_t, Value> values_; // by their ids
};

} // namespace

bool note_packed_ways(const uint8_t* payload, size_t size, PackedWays& ways) {
  if (size >= kGraphHeader && std::memcmp(payload + 4, "XH00", 4) == 0) { // without it, the flatbuffer is everything
    uint32_t start;
    uint32_t length;
    std::memcpy(&start, payload + 10, 4);
    std::memcpy(&length, payload + 14, 4);
    if (start > size || length > size - start) {
      throw_format_error("its graph does not fit");
    }
    payload += start;
    size = length;
  }
  return Graph(payload, size).note(ways);
}

} // namespace blobstore::internal
