#include <blobstore/program.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/data_loader.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/delegate.h>

#include "arena.h"
#include "file.h"
#include "fork.h"
#include "process_end.h"
#include "program_image.h"

namespace blobstore {
namespace {

namespace et = executorch::runtime;
using EtError = et::Error;
using EtTensor = executorch::aten::Tensor;

std::string describe(EtError error) {
  return std::string("ExecuTorch's ") + et::to_string(error);
}

/// Gives ExecuTorch the bytes of an image.
class ImageLoader final : public et::DataLoader {
 public:
  explicit ImageLoader(const ProgramImage& image) : image_(image) {}

  et::Result<et::FreeableBuffer> load(size_t offset, size_t size, const SegmentInfo& info) const override {
    if (info.segment_type == SegmentInfo::Type::Program) {
      if (offset > image_.flatbuffer_size() || size > image_.flatbuffer_size() - offset) {
        return EtError::InvalidProgram;
      }
      return et::FreeableBuffer(
          reinterpret_cast<const uint8_t*>(image_.flatbuffer().data()) + offset, size, nullptr);
    }
    if (offset == kBoundConstants && image_.constants() != nullptr) {
      return et::FreeableBuffer(image_.constants(), image_.constants_size(), nullptr);
    }
    if (offset > image_.file_size() || size > image_.file_size() - offset) {
      return EtError::InvalidProgram;
    }
    return et::FreeableBuffer(image_.whole().data() + offset, size, nullptr);
  }

  et::Error load_into(size_t offset, size_t size, const SegmentInfo& info, void* buffer) const override {
    et::Result<et::FreeableBuffer> found = load(offset, size, info);
    if (!found.ok()) {
      return found.error();
    }
    std::memcpy(buffer, found->data(), size);
    return EtError::Ok;
  }

  et::Result<size_t> size() const override {
    return std::max<size_t>(image_.file_size(), image_.flatbuffer_size());
  }

 private:
  const ProgramImage& image_;
};

ValueKind kind_of(et::Tag tag) {
  switch (tag) {
    case et::Tag::None:
      return ValueKind::None;
    case et::Tag::Tensor:
      return ValueKind::Tensor;
    case et::Tag::Int:
      return ValueKind::Int;
    case et::Tag::Double:
      return ValueKind::Double;
    case et::Tag::Bool:
      return ValueKind::Bool;
    case et::Tag::String:
      return ValueKind::String;
    default:
      return ValueKind::Other;
  }
}

const char* name_of(ValueKind kind) {
  constexpr const char* kNames[] = {"None", "a tensor", "an int", "a float", "a bool", "a string", "a list"};
  return kNames[static_cast<int>(kind)];
}

/// `tensor` is asked for tensors only: for anything else ExecuTorch logs an error.
template <typename TensorMeta>
ValueInfo value_info(et::Result<et::Tag> tag, const TensorMeta& tensor) {
  ValueInfo out;
  out.kind = tag.ok() ? kind_of(tag.get()) : ValueKind::Other;
  if (out.kind != ValueKind::Tensor) {
    return out;
  }
  if (const et::Result<et::TensorInfo> info = tensor(); info.ok()) {
    out.layout.scalar_type = static_cast<int8_t>(info->scalar_type());
    out.layout.sizes.assign(info->sizes().begin(), info->sizes().end());
    out.layout.dim_order.assign(info->dim_order().begin(), info->dim_order().end());
    out.name = info->name();
  }
  return out;
}

Layout layout_of(const EtTensor& tensor) {
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(tensor.scalar_type());
  layout.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  layout.dim_order.assign(tensor.dim_order().begin(), tensor.dim_order().end());
  return layout;
}

View view_of(const EtTensor& tensor) {
  return {tensor.mutable_data_ptr(), layout_of(tensor), tensor.nbytes()};
}

/// Memory that a method's tensors were planned into.
using Arenas = std::vector<std::shared_ptr<Mapping>>;

/// A little into a page, so that a tensor of whole pages does not end where one ends: a delegate that packs from here,
/// when trained parameters are published, reads a little more than the tensor and would be given a copy.
std::shared_ptr<Mapping> make_arena(size_t size) {
  return std::make_shared<Mapping>(size, 64);
}

class LoadedProgram;

class LoadedMethod final : public Method, private ForkAware {
 public:
  LoadedMethod(std::shared_ptr<LoadedProgram> program, size_t number, Arenas arenas, std::shared_ptr<std::mutex> state);
  ~LoadedMethod() override {
    leave();
    const BackendWork work;
    method_.reset();
  }

  const std::string& name() const override { return name_; }
  const std::vector<ValueInfo>& inputs() const override { return inputs_; }
  const std::vector<ValueInfo>& outputs() const override { return outputs_; }
  std::vector<Value> execute(const std::vector<Argument>& arguments, size_t results) override;
  View output_memory(size_t index) override;
  std::vector<std::pair<std::string, View>> state_memory() override;

 private:
  struct Input { // of tensors
    EtTensor tensor;
    void* planned; // where its memory was planned; null if the caller's is used always
    bool overlaid; // other tensors lie there too, and may be views of it
  };

  void load(const et::Program& program, const CacheDataMap& map, const ProgramImage& image, size_t number);
  void check(const std::vector<Argument>& arguments);
  void set(const std::vector<Argument>& arguments);
  void set_tensor(size_t index, const Argument& argument);
  void forget_inputs();
  bool may_share(const Argument& argument) const;
  Value result(const et::EValue& value) const;
  bool own(const EtTensor& tensor) const;
  void check_views() const;
  Error input_error(size_t index, const std::string& reason) const;

  void after_fork_in_child() override {
    renew(mutex_);
    if (shared_state_) {
      renew(*shared_state_); // each method that has it does so, before anyone runs
    }
  }

  std::shared_ptr<LoadedProgram> program_;
  size_t number_;
  std::string name_;
  std::vector<ValueInfo> inputs_;
  std::vector<ValueInfo> outputs_;
  Arenas arenas_;
  std::vector<et::Span<uint8_t>> spans_;
  Arena allocator_;
  Arena temporary_;
  std::unique_ptr<et::HierarchicalAllocator> planned_;
  std::unique_ptr<et::MemoryManager> manager_;
  std::optional<et::Method> method_;
  std::vector<std::optional<Input>> tensors_;
  bool delegated_ = false;
  std::map<size_t, const void*> viewed_; // outputs whose memory was given away
  std::mutex mutex_;
  std::shared_ptr<std::mutex> shared_state_; // if other methods use some of the same memory
};

class LoadedProgram final : public Program, private ForkAware {
 public:
  LoadedProgram(const std::string& path, std::shared_ptr<BlobCache> cache)
      : cache_(std::move(cache)), image_(path), loader_(image_), map_(cache_) {
    et::runtime_init();
    register_delegate();
    cache_->check_open();
    image_.bind(*cache_);
    et::Result<et::Program> loaded = et::Program::load(&loader_, et::Program::Verification::InternalConsistency);
    if (!loaded.ok()) {
      throw Error(ErrorKind::InvalidFile, path, "not a valid program: " + describe(loaded.error()));
    }
    program_.emplace(std::move(loaded.get()));
    enter();
  }
  ~LoadedProgram() override { leave(); }

  const std::string& path() const override { return image_.path(); }
  std::pair<const uint8_t*, size_t> file() const override {
    return {image_.whole().data(), static_cast<size_t>(image_.file_size())};
  }
  const std::shared_ptr<BlobCache>& cache() const override { return cache_; }
  const std::vector<std::string>& methods() const override { return image_.methods(); }

  std::vector<std::string> needs(const std::string& method) const override {
    std::vector<std::string> keys;
    for (const Need& need : image_.needs(number(method))) {
      keys.push_back(*need.key);
    }
    return keys;
  }

  std::vector<ValueInfo> inputs(const std::string& method) const override {
    const et::MethodMeta about = meta(method);
    std::vector<ValueInfo> infos;
    for (size_t i = 0; i < about.num_inputs(); ++i) {
      infos.push_back(value_info(about.input_tag(i), [&] { return about.input_tensor_meta(i); }));
    }
    return infos;
  }

  std::vector<ValueInfo> outputs(const std::string& method) const override {
    const et::MethodMeta about = meta(method);
    std::vector<ValueInfo> infos;
    for (size_t i = 0; i < about.num_outputs(); ++i) {
      infos.push_back(value_info(about.output_tag(i), [&] { return about.output_tensor_meta(i); }));
    }
    return infos;
  }

  std::vector<std::string> backends(const std::string& method) const override {
    std::vector<std::string> ids;
    for (const std::string* id : image_.backends(number(method))) {
      ids.push_back(*id);
    }
    return ids;
  }

  std::shared_ptr<Method> load_method(const std::string& name) override {
    cache_->check_open();
    const size_t at = number(name);
    for (const std::string* id : image_.backends(at)) {
      const et::BackendInterface* backend = et::get_backend_class(id->c_str());
      if (backend == nullptr || !backend->is_available()) {
        throw Error(
            ErrorKind::MissingBackend,
            path(),
            "method '" + name + "' is delegated to backend '" + *id + "', which this process does not have");
      }
    }
    const et::MethodMeta about = meta(name);
    Arenas arenas;
    std::shared_ptr<std::mutex> state;
    const BlobCache::Reading reading(*cache_); // before the lock, as in LoadedMethod::execute
    const std::lock_guard<std::mutex> guard(mutex_);
    for (size_t i = 0; i < about.num_memory_planned_buffers(); ++i) {
      const auto size = static_cast<size_t>(about.memory_planned_buffer_size(i).get());
      if (i == 0 || methods().size() == 1) { // what lies in the first one is no state
        arenas.push_back(make_arena(size));
      } else {
        arenas.push_back(shared_arena(i, size));
        state = state_;
      }
    }
    auto self = std::static_pointer_cast<LoadedProgram>(shared_from_this());
    return std::make_shared<LoadedMethod>(std::move(self), at, std::move(arenas), std::move(state));
  }

  et::MethodMeta meta(const std::string& method) const {
    number(method);
    et::Result<et::MethodMeta> about = program_->method_meta(method.c_str());
    if (!about.ok()) {
      throw Error(ErrorKind::InvalidFile, path(), "method '" + method + "' is damaged: " + describe(about.error()));
    }
    return about.get();
  }

  const et::Program& program() const { return *program_; }
  const ProgramImage& image() const { return image_; }
  const CacheDataMap& map() const { return map_; }

 private:
  size_t number(const std::string& method) const {
    const auto found = std::find(methods().begin(), methods().end(), method);
    if (found == methods().end()) {
      std::string names;
      for (const std::string& name : methods()) {
        names += (names.empty() ? "'" : ", '") + name + "'";
      }
      throw Error(ErrorKind::MethodNotFound, path(), "no method '" + method + "'; there are " + names);
    }
    return static_cast<size_t>(found - methods().begin());
  }

  /// Memory for planned buffer `index` of all methods, as large as any of them takes.
  std::shared_ptr<Mapping> shared_arena(size_t index, size_t size) {
    for (const std::string& method : methods()) {
      const et::MethodMeta about = meta(method);
      if (index < about.num_memory_planned_buffers()) {
        size = std::max(size, static_cast<size_t>(about.memory_planned_buffer_size(index).get()));
      }
    }
    shared_.resize(std::max(shared_.size(), index + 1));
    if (shared_[index] == nullptr) {
      shared_[index] = make_arena(size);
    }
    return shared_[index];
  }

  void after_fork_in_child() override { renew(mutex_); }

  std::shared_ptr<BlobCache> cache_;
  ProgramImage image_;
  ImageLoader loader_;
  CacheDataMap map_;
  std::optional<et::Program> program_;
  std::mutex mutex_;
  Arenas shared_;
  std::shared_ptr<std::mutex> state_ = std::make_shared<std::mutex>();
};

LoadedMethod::LoadedMethod(
    std::shared_ptr<LoadedProgram> program,
    size_t number,
    Arenas arenas,
    std::shared_ptr<std::mutex> state)
    : program_(std::move(program)),
      number_(number),
      name_(program_->methods()[number]),
      inputs_(program_->inputs(name_)),
      outputs_(program_->outputs(name_)),
      arenas_(std::move(arenas)),
      shared_state_(std::move(state)) {
  const et::MethodMeta about = program_->meta(name_);
  for (size_t i = 0; i < arenas_.size(); ++i) {
    spans_.emplace_back(arenas_[i]->data(), static_cast<size_t>(about.memory_planned_buffer_size(i).get()));
  }
  planned_ = std::make_unique<et::HierarchicalAllocator>(et::Span<et::Span<uint8_t>>(spans_.data(), spans_.size()));
  manager_ = std::make_unique<et::MemoryManager>(&allocator_, planned_.get(), &temporary_);
  delegated_ = !program_->image().backends(number).empty();
  load(program_->program(), program_->map(), program_->image(), number);
  enter();
}

void LoadedMethod::load(
    const et::Program& program,
    const CacheDataMap& map,
    const ProgramImage& image,
    size_t number) {
  const BlobCache::Reading reading(*map.cache()); // delegates pack what they read: one generation
  const CacheScope scope(map.cache(), /*served=*/false);
  CacheDataMap::Misses misses;
  (void)take_delegate_failure();
  const BackendWork work;
  et::Result<et::Method> loaded = program.load_method(name_.c_str(), manager_.get(), nullptr, &map);
  if (!loaded.ok()) {
    if (const auto failure = take_delegate_failure()) {
      throw Error(
          failure->kind, program_->path(), "method '" + name_ + "' has a delegate that cannot be loaded: " + failure->reason);
    }
    if (!misses.keys().empty()) {
      throw Error(
          ErrorKind::KeyNotFound,
          program_->path(),
          "method '" + name_ + "' takes '" + misses.keys().back() + "' from a data file, " + map.cache()->name() +
              " does not have it");
    }
    if (loaded.error() == EtError::OperatorMissing) {
      std::string names;
      for (const auto& [base, overload] : image.operators(number)) {
        const std::string op = *base + (overload->empty() ? "" : ".") + *overload;
        if (!et::registry_has_op_function(op.c_str())) {
          names += (names.empty() ? "" : ", ") + op;
        }
      }
      throw Error(ErrorKind::Program, program_->path(), "method '" + name_ + "' calls operators without a kernel: " + names);
    }
    throw Error(
        ErrorKind::Program,
        program_->path(),
        "method '" + name_ + "' cannot be loaded: " + describe(loaded.error()),
        static_cast<int>(loaded.error()));
  }
  method_.emplace(std::move(loaded.get()));
  std::vector<et::EValue> values(method_->inputs_size());
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  // gives access to the inputs' memory; inputs that are not set are refused in `check`
  const EtError error = method_->get_inputs(values.data(), values.size());
#pragma GCC diagnostic pop
  if (error != EtError::Ok) {
    throw Error(ErrorKind::Program, program_->path(), "method '" + name_ + "': " + describe(error));
  }
  const std::vector<bool>& overlaid = image.overlaid_inputs(number);
  tensors_.clear();
  tensors_.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor()) {
      tensors_[i] = Input{values[i].toTensor(), values[i].toTensor().mutable_data_ptr(), overlaid[i]};
    }
  }
}

Error LoadedMethod::input_error(size_t index, const std::string& reason) const {
  std::string which = "input " + std::to_string(index);
  if (!inputs_[index].name.empty()) {
    which += " ('" + inputs_[index].name + "')";
  }
  return Error(ErrorKind::Input, program_->path(), "method '" + name_ + "': " + which + " " + reason);
}

void LoadedMethod::check(const std::vector<Argument>& arguments) {
  if (arguments.size() != inputs_.size()) {
    throw Error(
        ErrorKind::Input,
        program_->path(),
        "method '" + name_ + "' takes " + std::to_string(inputs_.size()) + " inputs, " +
            std::to_string(arguments.size()) + " were given");
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].kind != inputs_[i].kind) {
      throw input_error(i, std::string("is ") + name_of(inputs_[i].kind) + ", not " + name_of(arguments[i].kind));
    }
    if (arguments[i].kind == ValueKind::Tensor && arguments[i].scalar_type != inputs_[i].layout.scalar_type) {
      Layout found = {arguments[i].scalar_type, {}, {}};
      found.sizes.assign(arguments[i].sizes, arguments[i].sizes + arguments[i].rank);
      throw input_error(i, "is " + to_string(inputs_[i].layout) + ", not " + to_string(found));
    }
  }
}

/// Whether the method may read the argument where it is. XNNPACK reads up to 128 bytes behind the end, without using
/// them, so these must at least be mapped.
bool LoadedMethod::may_share(const Argument& argument) const {
  if (!argument.writable) {
    return false;
  }
  if (!delegated_ || argument.nbytes == 0) {
    return true;
  }
  const uintptr_t end = reinterpret_cast<uintptr_t>(argument.data) + argument.nbytes;
  return (end - 1) / page_size() == (end + 127) / page_size();
}

void LoadedMethod::set_tensor(size_t index, const Argument& argument) {
  Input& input = *tensors_[index];
  EtTensor& tensor = input.tensor;
  const executorch::aten::ArrayRef<executorch::aten::SizesType> sizes(argument.sizes, argument.rank);
  const auto now = tensor.sizes();
  if (now.size() != sizes.size() || !std::equal(sizes.begin(), sizes.end(), now.begin())) {
    // ExecuTorch itself only compares the numbers of elements with the largest possible
    const auto& largest = inputs_[index].layout.sizes;
    const bool fits = now.size() == sizes.size() &&
        std::equal(sizes.begin(), sizes.end(), largest.begin(), [](int32_t a, int32_t b) { return a <= b; });
    if (!fits || et::resize_tensor(tensor, sizes) != EtError::Ok) {
      Layout found = {argument.scalar_type, {}, {}};
      found.sizes.assign(argument.sizes, argument.sizes + argument.rank);
      throw input_error(index, "is " + to_string(inputs_[index].layout) + ", not " + to_string(found));
    }
  }
  if (argument.nbytes != tensor.nbytes()) {
    throw input_error(
        index, "takes " + std::to_string(tensor.nbytes()) + " bytes, not " + std::to_string(argument.nbytes));
  }
  void* data = const_cast<void*>(argument.data);
  if (input.planned != nullptr && (input.overlaid || !may_share(argument))) {
    if (argument.nbytes != 0) {
      std::memcpy(input.planned, argument.data, argument.nbytes);
    }
    data = input.planned;
  }
  tensor.unsafeGetTensorImpl()->set_data(data);
}

void LoadedMethod::set(const std::vector<Argument>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Argument& argument = arguments[i];
    if (argument.kind == ValueKind::Tensor) {
      set_tensor(i, argument);
      continue;
    }
    et::EValue value;
    std::optional<et::EValue> text;
    if (argument.kind == ValueKind::Int) {
      value = et::EValue(argument.integer);
    } else if (argument.kind == ValueKind::Double) {
      value = et::EValue(argument.real);
    } else if (argument.kind == ValueKind::Bool) {
      value = et::EValue(argument.integer != 0);
    } else if (argument.kind != ValueKind::None) {
      throw input_error(i, std::string("is ") + name_of(argument.kind) + ", which cannot be given");
    }
    if (const EtError error = method_->set_input(value, i); error != EtError::Ok) {
      throw input_error(i, "has another value than the program was exported with, which it cannot change");
    }
  }
}

void LoadedMethod::forget_inputs() {
  for (auto& input : tensors_) {
    if (input) {
      input->tensor.unsafeGetTensorImpl()->set_data(input->planned);
    }
  }
}

Value LoadedMethod::result(const et::EValue& value) const {
  Value out;
  out.kind = kind_of(value.tag);
  if (value.isTensor()) {
    const EtTensor& tensor = value.toTensor();
    out.layout = layout_of(tensor);
    out.nbytes = tensor.nbytes();
    out.data = {static_cast<uint8_t*>(std::aligned_alloc(64, align_up(std::max<size_t>(out.nbytes, 1), 64))), &std::free};
    if (out.data == nullptr) {
      throw std::bad_alloc();
    }
    if (out.nbytes != 0) {
      std::memcpy(out.data.get(), tensor.const_data_ptr(), out.nbytes);
    }
  } else if (value.isInt()) {
    out.integer = value.toInt();
  } else if (value.isBool()) {
    out.integer = value.toBool();
  } else if (value.isDouble()) {
    out.real = value.toDouble();
  } else if (value.isString()) {
    const auto text = value.toString();
    out.text.assign(text.data(), text.size());
  }
  return out;
}

/// Whether a tensor lies in this method's own memory.
bool LoadedMethod::own(const EtTensor& tensor) const {
  const auto at = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return std::any_of(spans_.begin(), spans_.end(), [&](const et::Span<uint8_t>& span) {
    const auto begin = reinterpret_cast<uintptr_t>(span.data());
    return at >= begin && at - begin <= span.size() && tensor.nbytes() <= span.size() - (at - begin);
  });
}

View LoadedMethod::output_memory(size_t index) {
  const std::lock_guard<std::mutex> turn(mutex_);
  if (index >= outputs_.size() || outputs_[index].kind != ValueKind::Tensor) {
    throw Error(
        ErrorKind::Input, program_->path(), "method '" + name_ + "': output " + std::to_string(index) + " is no tensor");
  }
  const EtTensor& tensor = method_->get_output(index).toTensor();
  if (!own(tensor)) {
    throw Error(
        ErrorKind::Unsupported,
        program_->path(),
        "method '" + name_ + "': output " + std::to_string(index) + " has no memory that was planned for it");
  }
  viewed_.emplace(index, tensor.const_data_ptr());
  return view_of(tensor);
}

std::vector<std::pair<std::string, View>> LoadedMethod::state_memory() {
  const std::lock_guard<std::mutex> turn(mutex_);
  const et::MethodMeta about = program_->meta(name_);
  std::vector<std::pair<std::string, View>> found;
  for (size_t i = 0; i < about.num_attributes(); ++i) {
    const auto info = about.attribute_tensor_meta(i);
    if (!info.ok()) {
      throw Error(ErrorKind::InvalidFile, program_->path(), "method '" + name_ + "': " + describe(info.error()));
    }
    auto tensor = method_->get_attribute(info->name());
    if (tensor.ok() && own(tensor.get())) {
      found.emplace_back(info->name(), view_of(tensor.get()));
    }
  }
  return found;
}

/// What was given away must stay what it is.
void LoadedMethod::check_views() const {
  for (const auto& [index, data] : viewed_) {
    if (method_->get_output(index).toTensor().const_data_ptr() != data) {
      throw Error(
          ErrorKind::Execution,
          program_->path(),
          "method '" + name_ + "': output " + std::to_string(index) + " went to another place in memory");
    }
  }
}

std::vector<Value> LoadedMethod::execute(const std::vector<Argument>& arguments, size_t count) {
  check(arguments);
  // first of all: who waits for readers to go may keep new ones out, so nobody may wait for a reader's turn to begin
  const BlobCache::Reading reading(*program_->cache());
  const std::lock_guard<std::mutex> turn(mutex_);
  std::unique_lock<std::mutex> state;
  if (shared_state_) {
    state = std::unique_lock<std::mutex>(*shared_state_);
  }
  struct Forget { // the caller's memory is his again, however this ends
    LoadedMethod& method;
    ~Forget() { method.forget_inputs(); }
  } forget{*this};
  set(arguments);
  const EtError error = [&] {
    const Execution execution;
    const BackendWork work;
    return method_->execute();
  }();
  if (error != EtError::Ok) {
    const auto failure = take_delegate_failure();
    throw Error(
        ErrorKind::Execution,
        program_->path(),
        "method '" + name_ + "' failed: " + (failure ? failure->reason : describe(error)),
        static_cast<int>(error));
  }
  std::vector<Value> results;
  check_views();
  count = std::min(count, method_->outputs_size());
  results.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    results.push_back(result(method_->get_output(i)));
  }
  return results;
}

} // namespace

std::shared_ptr<Program> Program::load(const std::string& path, std::shared_ptr<BlobCache> cache) {
  return std::make_shared<LoadedProgram>(path, std::move(cache));
}

} // namespace blobstore
