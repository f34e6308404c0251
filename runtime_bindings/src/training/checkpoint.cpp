#include "training/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <utility>

#include <blobstore/error.h>

#include "format/constants.h"
#include "format/digest.h"
#include "format/file_kind.h"
#include "format/format_error.h"
#include "format/json.h"
#include "format/ptd_writer.h"
#include "format/utf8.h"
#include "os/output_file.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr char kListBegin[] = R"({"format":"blobstore training checkpoint)";
constexpr uint64_t kListVersion = 0;
constexpr uint32_t kTensorAlignment = 16; // the default of ExecuTorch's serializer
constexpr char kOptimizerKeys[] = "optimizer"; // what its keys begin with

/// A tensor in the list.
struct Listed {
  std::string digest; // in hexadecimal
  std::optional<Layout> layout; // if it is stored in the base
};

/// A list whose structure was checked.
struct List {
  std::vector<std::string> parameters;
  std::vector<std::string> buffers;
  std::vector<std::pair<std::string, Listed>> tensors;
  std::string frozen;
  std::vector<std::string> bases;
  std::string_view optimizer; // JSON, which refers to the tensors; empty if there is none
};

std::string hex_digest(const void* data, size_t size) {
  return to_string(digest(data, size));
}

const PtdFile* in_base(const std::vector<PtdFile>& bases, std::string_view key) {
  const auto found =
      std::find_if(bases.rbegin(), bases.rend(), [&](const PtdFile& base) { return base.index_of(key).has_value(); });
  return found == bases.rend() ? nullptr : &*found;
}

// Writing

/// @param each appends one value.
template <typename Values, typename Each>
void append_list(std::string& json, const Values& values, const Each& each) {
  json += '[';
  bool first = true;
  for (const auto& value : values) {
    json += first ? "" : ",";
    first = false;
    each(value);
  }
  json += ']';
}

void append_names(std::string& json, const char* field, const SavedTensors& tensors) {
  json += format(",\"{}\":", field);
  append_list(json, tensors, [&](const auto& named) { append_json(json, named.first); });
}

std::string optimizer_json(const OptimizerState& state, SavedTensors& tensors) {
  std::string json = R"({"kind":)";
  append_json(json, state.kind);
  json += R"(,"groups":)";
  size_t index = 0;
  append_list(json, state.groups, [&](const OptimizerState::Group& group) {
    json += R"({"options":)";
    append_json(json, group.options, format("{}/{}", kOptimizerKeys, index++), tensors);
    json += R"(,"params":)";
    append_list(json, group.parameters, [&](const std::string& name) { append_json(json, name); });
    json += '}';
  });
  json += R"(,"state":{)";
  for (const auto& [name, kept] : state.state) {
    json += json.back() == '{' ? "" : ",";
    append_json(json, name);
    json += ':';
    append_json(json, kept, format("{}/{}", kOptimizerKeys, name), tensors);
  }
  return json + "}}";
}

template <typename Number>
void append_numbers(std::string& json, const std::vector<Number>& numbers) {
  append_list(json, numbers, [&](Number number) { json += std::to_string(number); });
}

/// A tensor as the list has it, with the layout if it is in a base.
std::string listed_json(const SavedTensor& tensor, bool is_in_base) {
  std::string json = "[\"" + hex_digest(tensor.bytes.data(), tensor.bytes.size()) + '"';
  if (is_in_base) {
    json += format(",[{},", tensor.layout.scalar_type);
    append_numbers(json, tensor.layout.sizes);
    json += ',';
    append_numbers(json, tensor.layout.dim_order);
    json += ']';
  }
  return json + ']';
}

bool is_in(const PtdFile* base, const std::string& key, const SavedTensor& tensor) {
  if (base == nullptr) {
    return false;
  }
  const SourceBlob blob = base->blob(*base->index_of(key));
  return *blob.layout == tensor.layout && blob.size == tensor.bytes.size() &&
      (blob.size == 0 || std::memcmp(blob.data, tensor.bytes.data(), blob.size) == 0);
}

// Reading

[[noreturn]] void throw_list_malformed(const PtdFile& file, const std::string& reason) {
  throw_error_in(ErrorKind::InvalidFile, file.name(), "the checkpoint's list of its tensors is malformed: {}", reason);
}

/// Read an object that has some fields, each by its function. Others are skipped.
/// @returns one that is missing; empty if none is.
std::string read_fields(JsonReader& json, std::map<std::string, std::function<void()>> fields) {
  json.object([&](const std::string& field) {
    const auto known = fields.find(field);
    if (known == fields.end()) {
      json.skip();
      return;
    }
    known->second();
    fields.erase(known);
  });
  return fields.empty() ? std::string() : fields.begin()->first;
}

std::string read_text(JsonReader& json) {
  if (!json.at_string()) {
    throw_format_error("a text is missing");
  }
  return json.string();
}

/// Read an array, each of its first items by its function. Others are skipped. @returns how many it has.
size_t read_items(JsonReader& json, const std::vector<std::function<void()>>& items) {
  size_t count = 0;
  json.array([&] {
    if (count < items.size()) {
      items[count]();
    } else {
      json.skip();
    }
    ++count;
  });
  return count;
}

std::vector<std::string> read_texts(JsonReader& json) {
  std::vector<std::string> texts;
  json.array([&] { texts.push_back(read_text(json)); });
  return texts;
}

template <typename Number>
std::vector<Number> read_numbers(JsonReader& json) {
  std::vector<Number> numbers;
  json.array([&] {
    const std::optional<uint64_t> number = json.size();
    if (!number || *number > static_cast<uint64_t>(std::numeric_limits<Number>::max()) || numbers.size() > kMaxRank) {
      throw_format_error("a layout has an impossible number");
    }
    numbers.push_back(static_cast<Number>(*number));
  });
  return numbers;
}

Layout read_layout(JsonReader& json) {
  Layout layout;
  const size_t parts = read_items(
      json,
      {[&] { layout.scalar_type = static_cast<int8_t>(std::min<uint64_t>(json.size().value_or(127), 127)); },
       [&] { layout.sizes = read_numbers<int32_t>(json); },
       [&] { layout.dim_order = read_numbers<uint8_t>(json); }});
  const std::string problem = parts == 3 ? layout_problem(layout) : "it needs three parts";
  if (!problem.empty()) {
    throw_format_error("a layout is impossible: {}", problem);
  }
  return layout;
}

Listed read_listed(JsonReader& json) {
  Listed listed;
  const auto read_place = [&] {
    if (!json.take_literal("null")) {
      listed.layout = read_layout(json);
    }
  };
  const size_t parts = read_items(json, {[&] { listed.digest = read_text(json); }, read_place});
  if (parts == 0) {
    throw_format_error("a tensor has no digest");
  }
  if (parts > 2) {
    throw_format_error("a tensor has too many parts");
  }
  return listed;
}

/// @throws FormatError: `write_checkpoint` cannot have written it.
List parse_list(std::string_view text) {
  if (!is_utf8(text)) {
    throw_format_error("it is not UTF-8");
  }
  List list;
  JsonReader json(text, "the list");
  const std::string missing = read_fields(
      json,
      {{"version",
        [&] {
          if (json.size() != kListVersion) {
            throw_format_error("unknown version");
          }
        }},
       {"parameters", [&] { list.parameters = read_texts(json); }},
       {"buffers", [&] { list.buffers = read_texts(json); }},
       {"tensors",
        [&] { json.object([&](const std::string& key) { list.tensors.emplace_back(key, read_listed(json)); }); }},
       {"frozen", [&] { list.frozen = read_text(json); }},
       {"bases", [&] { list.bases = read_texts(json); }},
       {"optimizer", [&] { list.optimizer = json.take_literal("null") ? std::string_view() : json.skip(); }}});
  json.end();
  if (!missing.empty()) {
    throw_format_error("{} is missing", missing);
  }
  std::set<std::string> names(list.parameters.begin(), list.parameters.end());
  names.insert(list.buffers.begin(), list.buffers.end());
  const bool fits = names.size() == list.parameters.size() + list.buffers.size();
  for (const auto& [key, listed] : list.tensors) {
    names.erase(key);
  }
  if (!fits || !names.empty()) {
    throw_format_error("a parameter or buffer is named twice, or is not among the tensors");
  }
  return list;
}

std::string_view find_list(const PtdFile& file) {
  for (size_t i = 0; i < file.size(); ++i) {
    const SourceBlob blob = file.blob(i);
    const std::string_view text(reinterpret_cast<const char*>(blob.data), blob.size);
    if (file.key(i).rfind(kKeyPrefix, 0) == 0 && text.rfind(kListBegin, 0) == 0) {
      if (file.key(i) != kKeyPrefix + hex_digest(blob.data, blob.size)) {
        throw_error_in(ErrorKind::Integrity, file.name(), "the checkpoint's list of its tensors is damaged");
      }
      return text;
    }
  }
  throw_error_in(
      ErrorKind::InvalidFile, file.name(), "not a checkpoint: the file has no list of a checkpoint's tensors");
}

std::shared_ptr<const SavedTensor> copy_of(const SourceBlob& blob) {
  return std::make_shared<const SavedTensor>(SavedTensor{**blob.layout, {blob.data, blob.data + blob.size}});
}

std::shared_ptr<const SavedTensor> take_from_file(
    const PtdFile& file, const std::string& key, const std::string& expected) {
  const std::optional<SourceBlob> blob = file.find(key);
  if (!blob) {
    throw_error_in(ErrorKind::InvalidFile, file.name(), "the checkpoint's list contains '{}', the file does not", key);
  }
  if (!*blob->layout) {
    throw_error_in(
        ErrorKind::InvalidFile,
        file.name(),
        "the checkpoint's list contains '{}', which is opaque bytes, not a tensor",
        key);
  }
  const std::string found = hex_digest(blob->data, blob->size);
  if (found != expected) {
    throw_error_in(
        ErrorKind::Integrity,
        file.name(),
        "the bytes of '{}' are damaged: expected {}, found {}",
        key,
        expected,
        found);
  }
  return copy_of(*blob);
}

/// A copy of one tensor, after checking it.
std::shared_ptr<const SavedTensor> take(
    const PtdFile& file,
    const std::vector<PtdFile>& bases,
    const std::string& key,
    const Listed& listed,
    const std::vector<std::string>& named) {
  if (!listed.layout) {
    return take_from_file(file, key, listed.digest);
  }
  const PtdFile* base = in_base(bases, key);
  if (base == nullptr) {
    throw_error_in(
        ErrorKind::Checkpoint,
        file.name(),
        "'{}' is not in the checkpoint but in its base, {}; {}",
        key,
        joined(named, ", "),
        bases.empty() ? "none is given" : joined(bases, ", ", [](const PtdFile& one) { return one.name(); }));
  }
  const SourceBlob blob = *base->find(key);
  const std::string found = hex_digest(blob.data, blob.size);
  if (found != listed.digest || *blob.layout != listed.layout) {
    throw_error_in(
        ErrorKind::Checkpoint,
        file.name(),
        "its base, {}, is not {}: '{}' is {} with digest {} in the former, {} with digest {} in the latter",
        joined(named, ", "),
        base->name(),
        key,
        to_string(listed.layout),
        listed.digest,
        to_string(*blob.layout),
        found);
  }
  return copy_of(blob);
}

OptimizerState::Group read_group(JsonReader& json, const TensorsByKey& tensors) {
  OptimizerState::Group group;
  const std::string missing = read_fields(
      json,
      {{"options", [&] { group.options = read_plain_value(json, tensors); }},
       {"params", [&] { group.parameters = read_texts(json); }}});
  if (!missing.empty() || group.options.kind != PlainValue::Kind::Dict) {
    throw_format_error("a group of the optimizer lacks its options or parameters");
  }
  return group;
}

/// @throws FormatError: `optimizer_json` cannot have written it.
OptimizerState parse_optimizer(std::string_view text, const TensorsByKey& tensors) {
  OptimizerState state;
  JsonReader json(text, "the state of the optimizer");
  const std::string missing = read_fields(
      json,
      {{"kind", [&] { state.kind = read_text(json); }},
       {"groups", [&] { json.array([&] { state.groups.push_back(read_group(json, tensors)); }); }},
       {"state", [&] {
          json.object(
              [&](const std::string& name) { state.state.emplace_back(name, read_plain_value(json, tensors)); });
        }}});
  if (!missing.empty()) {
    throw_format_error("the state of the optimizer is incomplete");
  }
  std::set<std::string> names;
  size_t count = 0;
  for (const OptimizerState::Group& group : state.groups) {
    names.insert(group.parameters.begin(), group.parameters.end());
    count += group.parameters.size();
  }
  const bool known = std::all_of(state.state.begin(), state.state.end(), [&](const auto& kept) {
    return names.count(kept.first) != 0 && kept.second.kind == PlainValue::Kind::Dict;
  });
  if (names.size() != count || !known) {
    throw_format_error("a parameter of the optimizer is named twice, or is in no group, or its state is no dictionary");
  }
  return state;
}

} // namespace

std::vector<PtdFile> open_bases(const std::vector<std::string>& paths) {
  std::vector<PtdFile> bases;
  bases.reserve(paths.size());
  for (const std::string& path : paths) {
    bases.emplace_back(path);
  }
  return bases;
}

uint64_t write_checkpoint(
    const std::string& path,
    const Checkpoint& checkpoint,
    const std::vector<PtdFile>& bases,
    const std::map<std::string, std::string>& metadata,
    const std::vector<std::string>& inputs) {
  check_data_output(path, inputs);
  SavedTensors tensors = checkpoint.parameters;
  tensors.insert(tensors.end(), checkpoint.buffers.begin(), checkpoint.buffers.end());
  const std::string optimizer = checkpoint.optimizer ? optimizer_json(*checkpoint.optimizer, tensors) : "null";
  const auto check_bases = [&] {
    for (const PtdFile& base : bases) {
      base.check_length();
    }
  };
  check_bases();
  PtdWriter writer(/*share=*/true, check_bases);
  std::vector<std::optional<Layout>> layouts(tensors.size()); // the writer refers to them
  std::string listed;
  std::set<std::string> keys;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [key, tensor] = tensors[i];
    if (!keys.insert(key).second) {
      throw_error(ErrorKind::KeyConflict, "two tensors of the checkpoint would have the key '{}'", key);
    }
    const bool known = is_in(in_base(bases, key), key, *tensor);
    if (!known) {
      layouts[i] = tensor->layout;
      writer.add(key, layouts[i], kTensorAlignment, tensor->bytes.data(), tensor->bytes.size());
    }
    listed += listed.empty() ? "" : ",";
    append_json(listed, key);
    listed += ':' + listed_json(*tensor, known);
  }
  std::string list = format("{}\",\"version\":{}", kListBegin, kListVersion);
  append_names(list, "parameters", checkpoint.parameters);
  append_names(list, "buffers", checkpoint.buffers);
  list += R"(,"tensors":{)" + listed + R"(},"frozen":)";
  append_json(list, checkpoint.frozen);
  list += R"(,"bases":)";
  append_list(
      list, bases, [&](const PtdFile& base) { append_json(list, base.name().substr(base.name().rfind('/') + 1)); });
  list += R"(,"optimizer":)" + optimizer + '}';
  const std::string key = kKeyPrefix + hex_digest(list.data(), list.size());
  const std::optional<Layout> opaque;
  writer.add(key, opaque, 1, reinterpret_cast<const uint8_t*>(list.data()), list.size());
  OutputFile file(path);
  const uint64_t size = writer.write(file, metadata);
  file.commit();
  return size;
}

Checkpoint read_checkpoint(const std::string& path, const std::vector<PtdFile>& bases) {
  const PtdFile file(path);
  file.check_length();
  for (const PtdFile& base : bases) {
    base.check_length();
  }
  const std::string_view text = find_list(file);
  Checkpoint checkpoint;
  try {
    const List list = parse_list(text);
    TensorsByKey tensors;
    for (const auto& [key, listed] : list.tensors) {
      tensors.emplace(key, take(file, bases, key, listed, list.bases));
    }
    for (const std::string& name : list.parameters) {
      checkpoint.parameters.emplace_back(name, tensors.at(name));
    }
    for (const std::string& name : list.buffers) {
      checkpoint.buffers.emplace_back(name, tensors.at(name));
    }
    if (!list.optimizer.empty()) {
      checkpoint.optimizer = parse_optimizer(list.optimizer, tensors);
    }
    checkpoint.frozen = list.frozen;
  } catch (const FormatError& error) {
    throw_list_malformed(file, error.what());
  }
  return checkpoint;
}

} // namespace blobstore::internal
