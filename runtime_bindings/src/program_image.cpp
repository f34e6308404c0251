#include "program_image.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "utf8.h"

namespace blobstore {
namespace {

constexpr size_t kHeaderAt = 8;
constexpr size_t kHeaderSize = 32;
constexpr size_t kProgramSizeAt = 16;

// Numbers of fields in schema/program.fbs.
enum ProgramField { kPlans = 1, kConstantBuffer = 2, kSegments = 4, kConstantSegment = 5 };
enum PlanField { kName = 0, kValues = 2, kInputs = 3, kOperators = 6, kDelegates = 7 };
enum AllocationField { kMemoryId = 0, kOffsetLow = 1, kOffsetHigh = 2 };
enum ValueField { kValueType = 0, kValue = 1 };
enum TensorField {
  kScalarType = 0,
  kStorageOffset = 1,
  kSizes = 2,
  kDimOrder = 3,
  kRequiresGrad = 4,
  kDataBuffer = 5,
  kAllocation = 6,
  kLayoutField = 7,
  kDynamism = 8,
  kExtra = 9,
  kTensorFields = 10,
};
enum ExtraField { kFqn = 1, kLocation = 2, kDeviceType = 3, kDeviceIndex = 4, kExtraFields = 5 };

constexpr uint8_t kTensorType = 5; // of the union KernelTypes
constexpr uint8_t kExternal = 1; // of TensorDataLocation

/// Scalar type, sizes and dim order of a Tensor; nothing if a later ExecuTorch is needed to tell.
std::optional<Layout> tensor_layout(const FlatBuffer& buffer, uint64_t tensor) {
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(buffer.u8_field(tensor, kScalarType));
  const FlatVector sizes = buffer.vector(tensor, kSizes, 4);
  const FlatVector order = buffer.vector(tensor, kDimOrder, 1);
  if (sizes.count > kMaxRank || sizes.count != order.count) {
    throw FormatError("a tensor has " + std::to_string(sizes.count) + " sizes and a dim_order of " +
                      std::to_string(order.count));
  }
  for (uint32_t i = 0; i < sizes.count; ++i) {
    layout.sizes.push_back(static_cast<int32_t>(buffer.u32(sizes.start + 4ull * i)));
    layout.dim_order.push_back(buffer.u8(order.start + i));
  }
  if (item_size(layout.scalar_type) == 0) {
    return std::nullopt;
  }
  if (const std::string problem = layout_problem(layout); !problem.empty()) {
    throw FormatError("impossible tensor " + to_string(layout) + ": " + problem);
  }
  return layout;
}

/// Whether a Tensor is what a blob is; without making a layout of it, as there may be many.
bool has_layout(const FlatBuffer& buffer, uint64_t tensor, const std::optional<Layout>& layout) {
  const FlatVector sizes = buffer.vector(tensor, kSizes, 4);
  const FlatVector order = buffer.vector(tensor, kDimOrder, 1);
  return layout && static_cast<int8_t>(buffer.u8_field(tensor, kScalarType)) == layout->scalar_type &&
      sizes.count == layout->sizes.size() && order.count == layout->dim_order.size() &&
      (sizes.count == 0 || (std::memcmp(buffer.data() + sizes.start, layout->sizes.data(), 4ull * sizes.count) == 0 &&
                            std::memcmp(buffer.data() + order.start, layout->dim_order.data(), order.count) == 0));
}

/// Where a tensor was planned to lie.
struct Place {
  uint32_t memory;
  uint64_t begin;
  uint64_t end;
};

/// The place of a value; nothing if it is no tensor, or none that was planned.
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
  // a tensor of an unknown type is taken to be as large as can be
  const uint64_t size = layout ? layout_nbytes(*layout).value_or(UINT64_MAX) : UINT64_MAX;
  return Place{buffer.u32_field(allocation, kMemoryId), begin, size > UINT64_MAX - begin ? UINT64_MAX : begin + size};
}

/// See ProgramImage::overlaid_inputs. Of the tensors in a memory, those overlap a place that begin before its end, less
/// those that end before its begin; a place counts itself.
std::vector<bool> find_overlaid_inputs(const FlatBuffer& buffer, uint64_t plan, const FlatVector& values) {
  struct Bounds {
    std::vector<uint64_t> begins, ends;
  };
  std::vector<std::optional<Place>> places(values.count);
  std::map<uint32_t, Bounds> memories; // any numbers: as hash values they could all be equal
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
      continue; // ExecuTorch will refuse the first; the last has no bytes
    }
    const auto& [begins, ends] = memories[places[own]->memory];
    const auto begun = std::lower_bound(begins.begin(), begins.end(), places[own]->end) - begins.begin();
    const auto ended = std::upper_bound(ends.begin(), ends.end(), places[own]->begin) - ends.begin();
    overlaid[i] = begun - ended > 1;
  }
  return overlaid;
}

/// Whether constants lie in the flatbuffer itself, as old programs have them; one empty entry stands for "no data".
bool has_inline_constants(const FlatBuffer& buffer, uint64_t program) {
  const FlatVector constants = buffer.vector(program, kConstantBuffer, 4);
  return constants.count > 1 || (constants.count == 1 && buffer.vector(buffer.element(constants, 0), 0, 1).count != 0);
}

} // namespace

ProgramImage::ProgramImage(const std::string& path) : file_(path, false) {
  file_size_ = file_.size();
  uint8_t head[kHeaderAt + kHeaderSize] = {};
  if (file_size_ < sizeof head) {
    throw fail(std::to_string(file_size_) + " bytes are too few for a program");
  }
  file_.read(head, sizeof head, 0);
  if (std::memcmp(head + 4, "ET12", 4) != 0) {
    throw fail("not a program: expected the identifier 'ET12' at byte 4");
  }
  has_header_ = std::memcmp(head + kHeaderAt, "eh00", 4) == 0;
  uint64_t size = file_size_;
  if (has_header_) {
    std::memcpy(&size, head + kProgramSizeAt, 8);
    std::memcpy(&segment_base_, head + 24, 8);
    if (size > file_size_ || size < sizeof head || segment_base_ > file_size_) {
      throw fail(
          "truncated: the program takes " + std::to_string(size) + " bytes and its segments begin at " +
          std::to_string(segment_base_) + ", the file has " + std::to_string(file_size_));
    }
  }
  map_ = Mapping(file_, 0, file_size_, Mapping::Kind::ReadOnly);
  program_size_ = size;
  program_.resize(align_up(size, 8) / 8);
  file_.read(program_.data(), size, 0);
  try {
    read_methods(FlatBuffer(bytes(), program_size_));
  } catch (const FormatError& error) {
    throw fail(error.what());
  }
}

void ProgramImage::read_methods(const FlatBuffer& buffer) {
  const FlatVector plans = buffer.vector(buffer.root(), kPlans, 4);
  std::unordered_set<const std::string*> named;
  for (uint32_t p = 0; p < plans.count; ++p) {
    const uint64_t plan = buffer.element(plans, p);
    const std::string* method = name(buffer, plan, kName);
    if (method->empty()) {
      throw FormatError("method " + std::to_string(p) + " has no name");
    }
    if (!named.insert(method).second) {
      throw FormatError("two methods have the name '" + *method + "'");
    }
    methods_.push_back(*method);
    std::vector<Need> needs;
    std::unordered_set<const std::string*> seen;
    const FlatVector values = buffer.vector(plan, kValues, 4);
    for (uint32_t v = 0; v < values.count; ++v) {
      read_value(buffer, buffer.element(values, v), needs, seen);
    }
    needs_.push_back(std::move(needs));
    overlaid_inputs_.push_back(find_overlaid_inputs(buffer, plan, values));
    std::vector<const std::string*> backends;
    const FlatVector delegates = buffer.vector(plan, kDelegates, 4);
    seen.clear();
    for (uint32_t d = 0; d < delegates.count; ++d) {
      const std::string* id = name(buffer, buffer.element(delegates, d), 0);
      if (seen.insert(id).second) {
        backends.push_back(id);
      }
    }
    backends_.push_back(std::move(backends));
    std::vector<Operator> operators;
    const FlatVector ops = buffer.vector(plan, kOperators, 4);
    for (uint32_t o = 0; o < ops.count; ++o) {
      const uint64_t op = buffer.element(ops, o);
      operators.push_back({name(buffer, op, 0), name(buffer, op, 1)});
    }
    operators_.push_back(std::move(operators));
  }
}

/// The text in a field, empty where the field is absent. It is read and kept once, however often it is referred to.
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
      throw FormatError("a name is not valid UTF-8");
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
    const FlatBuffer& buffer,
    uint64_t value,
    std::vector<Need>& needs,
    std::unordered_set<const std::string*>& seen) {
  if (buffer.u8_field(value, kValueType) != kTensorType) {
    return;
  }
  const uint64_t slot = buffer.field(value, kValue, 4);
  if (slot == 0) {
    throw FormatError("a value is missing");
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
    needs.push_back({key, tensor_layout(buffer, tensor), planned});
  }
  const bool known = buffer.field_count(tensor) <= kTensorFields && buffer.field_count(extra) <= kExtraFields &&
      buffer.u32_field(tensor, kStorageOffset) == 0 && buffer.u8_field(extra, kDeviceType) == 0 &&
      buffer.u8_field(extra, kDeviceIndex) == 0 && item_size(static_cast<int8_t>(buffer.u8_field(tensor, 0))) != 0;
  if (!planned && known) {
    uses_.push_back({slot, tensor, key, external});
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
        throw Error(
            ErrorKind::Layout,
            path(),
            "method '" + methods_[method] + "' takes '" + *need.key + "' as " + to_string(need.layout) + ", it is " +
                to_string(blob->layout) + " in " + cache.name());
      }
    }
  }
  if (missing.empty()) {
    return;
  }
  std::string names;
  for (size_t i = 0; i < missing.size() && i < 10; ++i) {
    names += (i == 0 ? "'" : ", '") + *missing[i] + "'";
  }
  if (missing.size() > 10) {
    names += " and " + std::to_string(missing.size() - 10) + " more";
  }
  throw Error(
      ErrorKind::KeyNotFound,
      path(),
      "the program takes " + std::to_string(missing.size()) + " tensor" + (missing.size() == 1 ? "" : "s") +
          " from data files that " + cache.name() + " does not have: " + names);
}

void ProgramImage::bind(const BlobCache& cache) {
  check(cache);
  try {
    write_bound(cache);
  } catch (const FormatError& error) {
    throw fail(error.what());
  }
}

/// Appends objects to a flatbuffer and makes its references lead to them. References lead forward only, and whatever is
/// appended lies behind all that is there.
struct ProgramImage::Editor {
  std::vector<uint8_t> tail;
  uint64_t base; // where the tail will lie, a multiple of 8
  std::vector<std::pair<uint64_t, uint64_t>> links; // position of a reference -> where it leads

  uint64_t end() const { return base + tail.size(); }
  void align(size_t to, size_t and_then = 0) {
    while ((end() + and_then) % to != 0) {
      tail.push_back(0);
    }
  }
  template <typename T>
  uint64_t put(T value) {
    const uint64_t at = end();
    const auto* from = reinterpret_cast<const uint8_t*>(&value);
    tail.insert(tail.end(), from, from + sizeof value);
    return at;
  }
  void put_bytes(const uint8_t* from, size_t size) { tail.insert(tail.end(), from, from + size); }
  uint64_t put_vtable(std::initializer_list<uint16_t> entries) {
    align(2);
    const uint64_t at = end();
    for (const uint16_t entry : entries) {
      put(entry);
    }
    return at;
  }
  uint64_t start_table(uint64_t vtable) {
    align(4);
    return put(static_cast<int32_t>(end() - vtable));
  }
  void set(uint64_t at, uint32_t value) { std::memcpy(tail.data() + (at - base), &value, sizeof value); }
  void link_here(uint64_t reference) { set(reference, static_cast<uint32_t>(end() - reference)); }
};

void ProgramImage::write_bound(const BlobCache& cache) {
  const FlatBuffer buffer(bytes(), program_size_);
  const uint64_t root = buffer.root();
  const uint64_t constant_slot = buffer.field(root, kConstantSegment, 4);
  const uint64_t segments_slot = buffer.field(root, kSegments, 4);
  const uint64_t inline_slot = buffer.field(root, kConstantBuffer, 4);
  if (constant_slot == 0 || segments_slot == 0 || has_inline_constants(buffer, root)) {
    return;
  }
  const uint64_t constant_segment = buffer.follow(constant_slot);
  const FlatVector old_offsets = buffer.vector(constant_segment, 1, 8);
  const uint32_t old_segment = buffer.u32_field(constant_segment, 0);
  const FlatVector segments = buffer.vector_at(buffer.follow(segments_slot), 4);
  const uint8_t* old_constants = nullptr;
  uint64_t old_size = 0;
  if (old_offsets.count > 1) {
    if (old_segment >= segments.count) {
      return; // ExecuTorch will say so
    }
    const uint64_t segment = buffer.element(segments, old_segment);
    const uint64_t offset = buffer.u64_field(segment, 0);
    old_size = buffer.u64_field(segment, 1);
    if (offset > file_size_ - segment_base_ || old_size > file_size_ - segment_base_ - offset) {
      throw FormatError("truncated: the constants do not lie within the file");
    }
    old_constants = map_.data() + segment_base_ + offset;
  }

  std::vector<const Blob*> blobs;
  std::unordered_map<const std::string*, uint32_t> numbers; // key -> index into the new offsets
  std::vector<const std::string*> keys; // parallel to the blobs
  const uint32_t first = std::max<uint32_t>(old_offsets.count, 1); // 0 stands for no data
  uintptr_t low = old_constants ? reinterpret_cast<uintptr_t>(old_constants) : UINTPTR_MAX;
  uintptr_t high = old_constants ? low + old_size : 0;
  std::vector<std::pair<const Use*, uint32_t>> bound;
  numbers.reserve(uses_.size());
  blobs.reserve(uses_.size());
  bound.reserve(uses_.size());
  for (const Use& use : uses_) {
    auto found = numbers.find(use.key);
    if (found == numbers.end()) {
      const Blob* blob = cache.find(*use.key);
      if (blob == nullptr) {
        continue; // embedded, and not overridden
      }
      found = numbers.emplace(use.key, first + static_cast<uint32_t>(blobs.size())).first;
      blobs.push_back(blob);
      keys.push_back(use.key);
      const auto at = reinterpret_cast<uintptr_t>(blob->data);
      low = std::min(low, at);
      high = std::max(high, at + std::max<size_t>(blob->size, 1));
    }
    const Blob& blob = *blobs[found->second - first];
    if (!has_layout(buffer, use.table, blob.layout)) {
      throw Error(
          ErrorKind::Layout,
          path(),
          "'" + *use.key + "' is " + to_string(tensor_layout(buffer, use.table)) + " in the program and " +
              to_string(blob.layout) + " in " + cache.name());
    }
    bound.emplace_back(&use, found->second);
  }
  if (bound.empty()) {
    return;
  }

  Editor editor;
  editor.base = align_up(program_size_, 8);
  editor.tail.reserve(128 * bound.size() + 4096);
  editor.links.reserve(bound.size() + 4);
  const uint64_t tensor_vtable = editor.put_vtable({24, 24, 20, 0, 4, 8, 21, 12, 0, 22, 23, 16});
  const uint64_t extra_vtable = editor.put_vtable({8, 8, 0, 4});
  const uint64_t offsets_vtable = editor.put_vtable({8, 12, 4, 8});
  const uint64_t segment_vtable = editor.put_vtable({8, 24, 8, 16});
  std::vector<std::vector<uint64_t>> named(blobs.size()); // where the new tensors refer to their names
  for (const auto& [use, number] : bound) {
    editor.links.emplace_back(use->value_slot, 0);
    const uint64_t table = editor.start_table(tensor_vtable);
    editor.links.back().second = table;
    editor.put<uint32_t>(0); // sizes
    editor.put<uint32_t>(0); // dim_order
    editor.put<uint32_t>(number);
    editor.put<uint32_t>(0); // extra_tensor_info
    for (const unsigned field : {kScalarType, kRequiresGrad, kLayoutField, kDynamism}) {
      editor.put<uint8_t>(buffer.u8_field(use->table, field));
    }
    const FlatVector sizes = buffer.vector(use->table, kSizes, 4);
    editor.link_here(table + 4);
    editor.put<uint32_t>(sizes.count);
    editor.put_bytes(buffer.data() + sizes.start, 4ull * sizes.count);
    const FlatVector order = buffer.vector(use->table, kDimOrder, 1);
    editor.link_here(table + 8);
    editor.put<uint32_t>(order.count);
    editor.put_bytes(buffer.data() + order.start, order.count);
    editor.align(4);
    editor.link_here(table + 16);
    const uint64_t extra = editor.start_table(extra_vtable);
    editor.put<uint32_t>(0); // fully_qualified_name
    named[number - first].push_back(extra + 4);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    editor.align(4);
    for (const uint64_t reference : named[i]) {
      editor.link_here(reference);
    }
    editor.put<uint32_t>(static_cast<uint32_t>(keys[i]->size()));
    editor.put_bytes(reinterpret_cast<const uint8_t*>(keys[i]->data()), keys[i]->size() + 1); // and the NUL
  }
  const uint64_t table = editor.start_table(offsets_vtable);
  editor.links.emplace_back(constant_slot, table);
  editor.put<uint32_t>(segments.count); // the one that is added below
  const uint64_t reference = editor.put<uint32_t>(0);
  editor.align(8, 4);
  editor.link_here(reference);
  editor.put<uint32_t>(first + static_cast<uint32_t>(blobs.size()));
  const uint64_t skipped = old_constants ? reinterpret_cast<uintptr_t>(old_constants) - low : 0;
  for (uint32_t i = 0; i < first; ++i) {
    uint64_t offset = 0;
    if (i < old_offsets.count) {
      std::memcpy(&offset, buffer.data() + old_offsets.start + 8ull * i, 8);
    }
    editor.put<uint64_t>(offset > old_size ? UINT64_MAX : offset + skipped); // ExecuTorch refuses the former
  }
  for (const Blob* blob : blobs) {
    editor.put<uint64_t>(reinterpret_cast<uintptr_t>(blob->data) - low);
  }
  // the list of segments again, as a reference from there cannot lead back, and one more that stands for the cache
  editor.align(4);
  editor.links.emplace_back(segments_slot, editor.end());
  editor.put<uint32_t>(segments.count + 1);
  const uint64_t list = editor.end();
  for (uint32_t i = 0; i <= segments.count; ++i) {
    editor.put<uint32_t>(0);
  }
  for (uint32_t i = 0; i <= segments.count; ++i) {
    const uint64_t old = i < segments.count ? buffer.element(segments, i) : 0;
    editor.align(8);
    editor.link_here(list + 4ull * i);
    editor.start_table(segment_vtable);
    editor.put<uint32_t>(0);
    editor.put<uint64_t>(old ? buffer.u64_field(old, 0) : kBoundConstants - segment_base_);
    editor.put<uint64_t>(old ? buffer.u64_field(old, 1) : 8);
  }
  if (inline_slot != 0) { // a program has constants either inline or in a segment
    editor.align(4);
    editor.links.emplace_back(inline_slot, editor.end());
    editor.put<uint32_t>(0);
  }
  editor.align(8);
  if (editor.end() > INT32_MAX) {
    return; // a flatbuffer is at most 2 GB
  }

  std::vector<uint64_t> words(editor.end() / 8);
  auto* out = reinterpret_cast<uint8_t*>(words.data());
  std::memcpy(out, bytes(), program_size_);
  std::memcpy(out + editor.base, editor.tail.data(), editor.tail.size());
  for (const auto& [from, to] : editor.links) {
    const auto distance = static_cast<uint32_t>(to - from);
    std::memcpy(out + from, &distance, sizeof distance);
  }
  const uint64_t size = editor.end();
  if (has_header_) {
    std::memcpy(out + kProgramSizeAt, &size, sizeof size);
  }
  program_ = std::move(words);
  program_size_ = size;
  constants_ = reinterpret_cast<const uint8_t*>(low);
  constants_size_ = high - low;
}

} // namespace blobstore
