#include "format/records.h"

#include <cstring>

#include <blobstore/error.h>
#include <blobstore/layout.h>

#include "format/constants.h"
#include "format/digest.h"
#include "format/flatbuffer.h"
#include "format/utf8.h"

namespace blobstore::internal {
namespace {

constexpr uint32_t kMostSources = 64;

// Numbers of fields in schema/record.fbs.
enum SourceField { kName = 0, kAliases = 1, kScalarType = 2, kSizes = 3 };
enum StepField { kOperation = 0, kInts = 1, kFloats = 2, kNames = 3 };
enum RecordField {
  kKey = 0,
  kNbytes = 1,
  kSources = 2,
  kSteps = 3,
  kGroup = 4,
  kRefusal = 5,
  kAuxiliary = 6,
  kProductOf = 7,
  kFactor = 8
};
enum RecordsField { kVersionField = 0, kInner = 1, kRecords = 2, kOutside = 3, kShared = 4, kTransient = 5 };

/// Reads the parts of records. A writer never refers to a part twice; where a file does, the flatbuffer's budget ends
/// the reading, as a few bytes could stand for gigabytes.
class Parser {
 public:
  Parser(const uint8_t* data, size_t size) : buffer_(data, size) {}

  Records records() {
    const uint64_t root = buffer_.root();
    if (const uint32_t version = buffer_.u32_field(root, kVersionField); version > kRecordsVersion) {
      throw LaterVersion{version};
    }
    Records out;
    out.inner = text_in(root, kInner);
    const FlatVector records = buffer_.vector(root, kRecords, 4);
    for (uint32_t i = 0; i < records.count; ++i) {
      out.records.push_back(record(buffer_.element(records, i)));
    }
    out.outside = sources(root, kOutside);
    out.shared = texts(root, kShared);
    out.transient = texts(root, kTransient);
    return out;
  }

  struct LaterVersion {
    uint32_t version;
  };

 private:
  Record record(uint64_t table) {
    const uint32_t count = buffer_.vector(table, kSources, 4).count;
    if (count > kMostSources) {
      throw_format_error("a record has {} sources, at most {} are possible", count, kMostSources);
    }
    Record out;
    out.key = text_in(table, kKey);
    out.nbytes = buffer_.u64_field(table, kNbytes);
    out.sources = sources(table, kSources);
    const FlatVector steps = buffer_.vector(table, kSteps, 4);
    for (uint32_t i = 0; i < steps.count; ++i) {
      out.steps.push_back(step(buffer_.element(steps, i)));
    }
    out.group = buffer_.u32_field(table, kGroup);
    out.refusal = text_in(table, kRefusal);
    out.auxiliary = buffer_.u8_field(table, kAuxiliary) != 0;
    out.product_of = text_in(table, kProductOf);
    out.factor = buffer_.f64_field(table, kFactor);
    return out;
  }

  std::vector<SourceTensor> sources(uint64_t table, unsigned field) {
    const FlatVector vector = buffer_.vector(table, field, 4);
    std::vector<SourceTensor> out;
    for (uint32_t i = 0; i < vector.count; ++i) {
      out.push_back(source(buffer_.element(vector, i)));
    }
    return out;
  }

  SourceTensor source(uint64_t table) {
    SourceTensor out;
    out.name = text_in(table, kName);
    out.scalar_type = static_cast<int8_t>(buffer_.u8_field(table, kScalarType));
    if (item_size(out.scalar_type) == 0) {
      throw_format_error("{} is not a valid scalar type", out.scalar_type);
    }
    out.sizes = numbers<int64_t>(table, kSizes);
    out.aliases = texts(table, kAliases);
    return out;
  }

  Step step(uint64_t table) {
    Step out;
    const uint8_t operation = buffer_.u8_field(table, kOperation);
    if (operation < static_cast<uint8_t>(Operation::Reshape) || operation > static_cast<uint8_t>(Operation::NormBias)) {
      throw_format_error("{} is not a valid operation", operation);
    }
    out.operation = static_cast<Operation>(operation);
    out.ints = numbers<int64_t>(table, kInts);
    out.floats = numbers<double>(table, kFloats);
    out.names = texts(table, kNames);
    return out;
  }

  template <typename Number>
  std::vector<Number> numbers(uint64_t table, unsigned field) {
    static_assert(sizeof(Number) == 8);
    const FlatVector vector = buffer_.vector(table, field, 8);
    std::vector<Number> out(vector.count);
    if (vector.count != 0) {
      std::memcpy(out.data(), buffer_.data() + vector.start, 8ull * vector.count);
    }
    return out;
  }

  std::vector<std::string> texts(uint64_t table, unsigned field) {
    const FlatVector vector = buffer_.vector(table, field, 4);
    std::vector<std::string> out;
    for (uint32_t i = 0; i < vector.count; ++i) {
      out.push_back(text(buffer_.vector_at(buffer_.element(vector, i), 1)));
    }
    return out;
  }

  std::string text_in(uint64_t table, unsigned field) { return text(buffer_.vector(table, field, 1)); }

  std::string text(const FlatVector& vector) {
    const std::string_view found(reinterpret_cast<const char*>(buffer_.data() + vector.start), vector.count);
    if (!is_utf8(found)) {
      throw_format_error("a text is not valid UTF-8");
    }
    return std::string(found);
  }

  FlatBuffer buffer_;
};

} // namespace

const char* to_string(Operation operation) {
  constexpr const char* kTexts[] = {
      "",
      "reshape",
      "cast",
      "quantize tensor",
      "quantize channel",
      "quantize group",
      "swap in out",
      "channels last",
      "pack int4",
      "fold conv weight",
      "fold conv bias",
      "fold linear weight",
      "fold linear bias",
      "norm weight",
      "norm bias",
  };
  return kTexts[static_cast<int>(operation)];
}

bool Step::operator==(const Step& other) const {
  return operation == other.operation && ints == other.ints && floats == other.floats && names == other.names;
}

bool is_records(std::string_view key, const uint8_t* data, size_t size) {
  return key.rfind(kKeyPrefix, 0) == 0 && size >= 8 && std::memcmp(data + 4, kRecordsIdentifier, 4) == 0;
}

std::string records_key(const uint8_t* data, size_t size) {
  return kKeyPrefix + to_string(digest(data, size));
}

Records parse_records(const uint8_t* data, size_t size, const std::string& origin) {
  try {
    if (size < 8 || std::memcmp(data + 4, kRecordsIdentifier, 4) != 0) {
      throw_format_error("their magic is missing");
    }
    return Parser(data, size).records();
  } catch (const FormatError& error) {
    throw_error_in(ErrorKind::InvalidFile, origin, "the records of a delegate are damaged: {}", error.what());
  } catch (const Parser::LaterVersion& later) {
    throw_error_in(
        ErrorKind::InvalidFile,
        origin,
        "records have version {}, this blobstore reads up to {}",
        later.version,
        kRecordsVersion);
  }
}

} // namespace blobstore::internal
