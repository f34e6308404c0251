#include "program/program_image.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "format/utf8.h"
#include "os/text.h"
#include "program/bound_program.h"
#include "program/program_schema.h"

namespace blobstore::internal {
namespace {

constexpr size_t kHeaderAt = 8;
constexpr size_t kHeaderSize = 32;

/// Where a tensor was planned to lie in memory.
struct Place {
  uint32_t memory;
  uint64_t begin;
  uint64_t end;
};

/// The place of a value; empty if it is not a tensor or was not planned.
std::optional<Place> place_of(const FlatBuffer& buffer, uint64_t value) {
  if (buffer.u8_field(value, kValueType) != kTensorType) {
    return std::nullopt;
  }
  const uint64_t tensor = buffer.object(value, kValue);
  const uint64_t allocation = tensor == 0 ? 0 : buffer.object(tensor, kAllocation);
  if (allocation == 0) {
    return std::nullopt;
  }
  const std::optional<Layout> layout = tensor_layout(buffer, tensor);
  const uint64_t begin = buffer.u32_field(allocation, kOffsetLow) |
      (static_cast<uint64_t>(buffer.u32_field(allocation, kOffsetHigh)) << 32);
  // a tensor of an unknown type counts as large as possible
  const uint64_t size = layout ? layout_nbytes(*layout).value_or(UINT64_MAX) : UINT64_MAX;
  return Place{buffer.u32_field(allocation, kMemoryId), begin, size > UINT64_MAX - begin ? UINT64_MAX : begin + size};
}

/// ExecuTorch has a name for any tensor, but `MethodMeta` does not give that of an input.
std::vector<std::string> read_input_names(const FlatBuffer& buffer, uint64_t plan, const FlatVector& values) {
  const FlatVector inputs = buffer.vector(plan, kInputs, 4);
  std::vector<std::string> names(inputs.count);
  for (uint32_t i = 0; i < inputs.count; ++i) {
    const uint32_t own = buffer.u32(inputs.start + 4ull * i);
    if (own >= values.count) {
      continue; // ExecuTorch will report it
    }
    const uint64_t value = buffer.element(values, own);
    const bool is_tensor = buffer.u8_field(value, kValueType) == kTensorType;
    const uint64_t tensor = is_tensor ? buffer.object(value, kValue) : 0;
    const uint64_t extra = tensor == 0 ? 0 : buffer.object(tensor, kExtra);
    const std::string_view name = extra == 0 ? std::string_view() : buffer.string(extra, kFqn);
    names[i] = is_utf8(name) ? std::string(name) : std::string();
  }
  return names;
}

/// See ProgramImage::overlaid_inputs. The number of tensors that overlap a place is the number of those that begin
/// before its end, minus the number of those that end before its begin. A place counts itself.
std::vector<bool> find_overlaid_inputs(const FlatBuffer& buffer, uint64_t plan, const FlatVector& values) {
  struct Bounds {
    std::vector<uint64_t> begins, ends;
  };
  std::vector<std::optional<Place>> places(values.count);
  std::map<uint32_t, Bounds> memories; // ordered, because a file could choose numbers with equal hash values
  for (uint32_t v = 0; v < values.count; ++v) {
    places[v] = place_of(buffer, buffer.element(values, v));
    if (places[v]) {
      Bounds& memory = memories[places[v]->memory];
      memory.begins.push_back(places[v]->begin);
      memory.ends.push_back(places[v]->end);
    }
  }
  for (auto& [id, memory] : memories) {
    std::sort(memory.begins.begin(), memory.begins.end());
    std::sort(memory.ends.begin(), memory.ends.end());
  }
  const FlatVector inputs = buffer.vector(plan, kInputs, 4);
  std::vector<bool> overlaid(inputs.count);
  for (uint32_t i = 0; i < inputs.count; ++i) {
    const uint32_t own = buffer.u32(inputs.start + 4ull * i);
    if (own >= values.count || !places[own] || places[own]->begin == places[own]->end) {
      continue; // ExecuTorch will report a number out of range; a tensor without bytes overlaps nothing
    }
    const auto& [begins, ends] = memories[places[own]->memory];
    const auto begun = std::lower_bound(begins.begin(), begins.end(), places[own]->end) - begins.begin();
    const auto ended = std::upper_bound(ends.begin(), ends.end(), places[own]->begin) - ends.begin();
    overlaid[i] = begun - ended > 1;
  }
  return overlaid;
}

} // namespace

void ProgramImage::fail(const std::string& reason) const {
  throw_error_in(ErrorKind::InvalidFile, path(), "{}", reason);
}

ProgramImage::ProgramImage(const std::string& path) : file_(path, false) {
  file_size_ = file_.size();
  uint8_t head[kHeaderAt + kHeaderSize] = {};
  if (file_size_ < sizeof head) {
    fail(format("{} bytes are too few for a program", file_size_));
  }
  file_.read(head, sizeof head, 0);
  if (std::memcmp(head + 4, "ET12", 4) != 0) {
    fail("not a program: expected the identifier 'ET12' at byte 4");
  }
  has_header_ = std::memcmp(head + kHeaderAt, "eh00", 4) == 0;
  uint64_t size = file_size_;
  if (has_header_) {
    std::memcpy(&size, head + kProgramSizeAt, 8);
    std::memcpy(&segment_base_, head + 24, 8);
    if (size > file_size_ || size < sizeof head || segment_base_ > file_size_) {
      fail(format(
          "truncated: the program takes {} bytes and its segments begin at {}, the file has {}",
          size,
          segment_base_,
          file_size_));
    }
  }
  map_ = Mapping(file_, 0, file_size_, Mapping::Kind::ReadOnly);
  program_size_ = size;
  program_.resize(align_up(size, 8) / 8);
  file_.read(program_.data(), size, 0);
  try {
    read_methods(FlatBuffer(bytes(), program_size_));
  } catch (const FormatError& error) {
    fail(error.what());
  }
}

void ProgramImage::read_methods(const FlatBuffer& buffer) {
  const FlatVector plans = buffer.vector(buffer.root(), kPlans, 4);
  std::unordered_set<const std::string*> named;
  for (uint32_t p = 0; p < plans.count; ++p) {
    const uint64_t plan = buffer.element(plans, p);
    const std::string* method = name(buffer, plan, kName);
    if (method->empty()) {
      throw_format_error("method {} has no name", p);
    }
    if (!named.insert(method).second) {
      throw_format_error("two methods have the name '{}'", *method);
    }
    methods_.push_back(*method);
    const FlatVector values = buffer.vector(plan, kValues, 4);
    needs_.push_back(read_values(buffer, values));
    overlaid_inputs_.push_back(find_overlaid_inputs(buffer, plan, values));
    input_names_.push_back(read_input_names(buffer, plan, values));
    backends_.push_back(read_backends(buffer, plan));
    operators_.push_back(read_operators(buffer, plan));
  }
}

std::vector<Need> ProgramImage::read_values(const FlatBuffer& buffer, const FlatVector& values) {
  std::vector<Need> needs;
  std::unordered_set<const std::string*> seen;
  for (uint32_t v = 0; v < values.count; ++v) {
    read_value(buffer, buffer.element(values, v), needs, seen);
  }
  return needs;
}

std::vector<const std::string*> ProgramImage::read_backends(const FlatBuffer& buffer, uint64_t plan) {
  std::vector<const std::string*> backends;
  std::unordered_set<const std::string*> seen;
  const FlatVector delegates = buffer.vector(plan, kDelegates, 4);
  for (uint32_t d = 0; d < delegates.count; ++d) {
    const std::string* id = name(buffer, buffer.element(delegates, d), 0);
    if (seen.insert(id).second) {
      backends.push_back(id);
    }
  }
  return backends;
}

std::vector<Operator> ProgramImage::read_operators(const FlatBuffer& buffer, uint64_t plan) {
  std::vector<Operator> operators;
  const FlatVector ops = buffer.vector(plan, kOperators, 4);
  for (uint32_t o = 0; o < ops.count; ++o) {
    const uint64_t op = buffer.element(ops, o);
    operators.push_back({name(buffer, op, 0), name(buffer, op, 1)});
  }
  return operators;
}

/// The text in a field, empty if the field is absent. Each text is read and kept once, however often it is referred to.
const std::string* ProgramImage::name(const FlatBuffer& buffer, uint64_t table, unsigned field) {
  static const std::string none;
  const uint64_t place = buffer.object(table, field);
  if (place == 0) {
    return &none;
  }
  const std::string*& known = names_by_place_[place];
  if (known == nullptr) {
    const std::string_view text = buffer.string(table, field);
    if (!is_utf8(text) || text.find('\0') != std::string_view::npos) {
      throw_format_error("a name is not valid UTF-8");
    }
    const auto same = names_by_text_.find(text);
    if (same != names_by_text_.end()) {
      known = same->second;
    } else {
      known = &names_.emplace_back(text);
      names_by_text_.emplace(*known, known);
    }
  }
  return known;
}

void ProgramImage::read_value(
    const FlatBuffer& buffer, uint64_t value, std::vector<Need>& needs, std::unordered_set<const std::string*>& seen) {
  if (buffer.u8_field(value, kValueType) != kTensorType) {
    return;
  }
  const uint64_t slot = buffer.field(value, kValue, 4);
  if (slot == 0) {
    throw_format_error("a value is missing");
  }
  const uint64_t tensor = buffer.follow(slot);
  const uint64_t extra = buffer.object(tensor, kExtra);
  if (extra == 0 || buffer.field(extra, kFqn, 4) == 0) {
    return;
  }
  const bool external = buffer.u8_field(extra, kLocation) == kExternal;
  const bool planned = buffer.field(tensor, kAllocation, 4) != 0;
  if (!external && (planned || buffer.u32_field(tensor, kDataBuffer) == 0)) {
    return;
  }
  const std::string* key = name(buffer, extra, kFqn);
  if (external && seen.insert(key).second) {
    needs.push_back({key, tensor_layout(buffer, tensor)});
  }
  const bool known = buffer.field_count(tensor) <= kTensorFields && buffer.field_count(extra) <= kExtraFields &&
      buffer.u32_field(tensor, kStorageOffset) == 0 && buffer.u8_field(extra, kDeviceType) == 0 &&
      buffer.u8_field(extra, kDeviceIndex) == 0 && item_size(static_cast<int8_t>(buffer.u8_field(tensor, 0))) != 0;
  if (!planned && known) {
    uses_.push_back({slot, tensor, key});
  }
}

void ProgramImage::check(const BlobCache& cache) const {
  std::vector<const std::string*> missing;
  std::unordered_set<const std::string*> seen;
  for (size_t method = 0; method < methods_.size(); ++method) {
    for (const Need& need : needs_[method]) {
      const Blob* blob = cache.find(*need.key);
      if (blob == nullptr) {
        if (seen.insert(need.key).second) {
          missing.push_back(need.key);
        }
      } else if (need.layout && blob->layout != need.layout) {
        throw_error_in(
            ErrorKind::Layout,
            path(),
            "method '{}' takes '{}' as {}, it is {} in {}",
            methods_[method],
            *need.key,
            to_string(need.layout),
            to_string(blob->layout),
            cache.name());
      }
    }
  }
  if (missing.empty()) {
    return;
  }
  std::string names;
  for (size_t i = 0; i < missing.size() && i < 10; ++i) {
    names += format("{}{}'", i == 0 ? "'" : ", '", *missing[i]);
  }
  if (missing.size() > 10) {
    names += format(" and {} more", missing.size() - 10);
  }
  throw_error_in(
      ErrorKind::KeyNotFound,
      path(),
      "the program takes {} tensor{} from data files{}{}",
      missing.size(),
      missing.size() == 1 ? "" : "s",
      cache.size() == 0 ? ", but no data file was given: " : format(" that {} does not have: ", cache.name()),
      names);
}

void ProgramImage::bind(const BlobCache& cache) {
  check(cache);
  try {
    const FlatBuffer buffer(bytes(), program_size_);
    const ProgramFileView program{buffer, map_.data(), file_size_, segment_base_, has_header_};
    if (std::optional<BoundProgram> bound = bind_tensors(program, uses_, cache, path())) {
      program_ = std::move(bound->words);
      program_size_ = bound->size;
      constants_ = bound->constants;
      constants_size_ = bound->constants_size;
    }
  } catch (const FormatError& error) {
    fail(error.what());
  }
}

} // namespace blobstore::internal
