#include "program/loaded_method.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <blobstore/delegate.h>
#include <blobstore/reading.h>

#include "delegate/inner_setup.h"
#include "delegate/load_scope.h"
#include "os/text.h"
#include "program/values.h"

namespace blobstore::internal {

namespace et = executorch::runtime;
using EtError = et::Error;
using EtTensor = executorch::aten::Tensor;

namespace {

/// Behind a copy of an input, because delegates read beyond the end of tensors.
constexpr size_t kRoomBehind = 128;

Layout plain_layout(int8_t scalar_type, const executorch::aten::ArrayRef<executorch::aten::SizesType>& sizes) {
  return {scalar_type, {sizes.begin(), sizes.end()}, {}};
}

/// Whether one of some kernels is of an operator. Unlike the functions of ExecuTorch, this does not log that none is.
bool has_kernel(et::Span<const et::Kernel> kernels, const std::string& op) {
  return std::any_of(kernels.begin(), kernels.end(), [&](const et::Kernel& kernel) { return op == kernel.name_; });
}

} // namespace

LoadedMethod::LoadedMethod(
    std::shared_ptr<LoadedProgram> program,
    size_t number,
    Arenas arenas,
    std::shared_ptr<std::mutex> state,
    const LoadPlan& plan,
    LoadResult& result)
    : program_(std::move(program)),
      number_(number),
      name_(program_->methods()[number]),
      meta_(program_->method_meta(name_)),
      inputs_(input_infos(meta_)),
      outputs_(output_infos(meta_)),
      arenas_(std::move(arenas)),
      stock_packed_(plan.stock.file),
      stock_copy_(plan.stock.copy),
      shared_state_(std::move(state)) {
  for (size_t i = 0; i < arenas_.size(); ++i) {
    spans_.emplace_back(arenas_[i]->data(), static_cast<size_t>(meta_.memory_planned_buffer_size(i).get()));
  }
  planned_ = std::make_unique<et::HierarchicalAllocator>(et::Span<et::Span<uint8_t>>(spans_.data(), spans_.size()));
  manager_ = std::make_unique<et::MemoryManager>(&allocator_, planned_.get(), &temporary_);
  delegated_ = !program_->image().backends(number).empty();
  load(plan, result);
  find_inputs();
  enter();
}

void LoadedMethod::load(const LoadPlan& plan, LoadResult& result) {
  const CacheDataMap& map = program_->map();
  const BlobCache::Reading reading(*map.cache()); // so that all delegates pack bytes of one generation
  const CacheScope scope(map.cache(), /*served=*/false);
  CacheDataMap::Misses misses;
  (void)take_delegate_failure();
  const BackendWork work;
  const std::string stock_path = plan.stock.path();
  std::array<et::BackendOption, 2> options{packed_path_option(stock_path), weight_cache_option()};
  et::LoadBackendOptionsMap of_backends;
  if (!stock_path.empty()) {
    (void)of_backends.set_options(kXnnpack, et::Span<et::BackendOption>(options.data(), options.size()));
  }
  const et::NamedDataMap* blobs = plan.trial != nullptr ? plan.trial : &map;
  const LoadScope in_force(plan, result);
  find_kernels();
  const et::Span<const et::Kernel> kernels(kernels_.data(), kernels_.size());
  et::Result<et::Method> loaded =
      program_->program().load_method(name_.c_str(), manager_.get(), nullptr, blobs, &of_backends, kernels);
  if (!loaded.ok()) {
    throw_load_error(loaded.error(), misses);
  }
  method_.emplace(std::move(loaded.get()));
}

/// ExecuTorch gives a number only; what is known besides says more.
void LoadedMethod::throw_load_error(EtError error, const CacheDataMap::Misses& misses) const {
  const std::string method = format("method '{}' ", name_);
  if (const auto failure = take_delegate_failure()) {
    throw_error_in(
        failure->kind, program_->path(), "{}has a delegate that cannot be loaded: {}", method, failure->reason);
  }
  if (!misses.keys().empty()) {
    throw_error_in(
        ErrorKind::KeyNotFound,
        program_->path(),
        "{}takes '{}' from a data file, {} does not have it",
        method,
        misses.keys().back(),
        program_->cache()->name());
  }
  if (error == EtError::OperatorMissing) {
    std::string names;
    for (const std::string& op : missing_operators()) {
      if (!has_kernel(et::Span<const et::Kernel>(kernels_.data(), kernels_.size()), op)) {
        names += (names.empty() ? "" : ", ") + op;
      }
    }
    throw_error_in(ErrorKind::Program, program_->path(), "{}calls operators without a kernel: {}", method, names);
  }
  throw Error(
      ErrorKind::Program,
      program_->path(),
      format("{}cannot be loaded: {}", method, describe(error)),
      static_cast<int>(error));
}

std::vector<std::string> LoadedMethod::missing_operators() const {
  std::vector<std::string> missing;
  for (const auto& [base, overload] : program_->image().operators(number_)) {
    const std::string op = *base + (overload->empty() ? "" : ".") + *overload;
    if (!has_kernel(et::get_registered_kernels(), op)) {
      missing.push_back(op);
    }
  }
  return missing;
}

/// Where ExecuTorch lacks a kernel and there is a spare one, give the method a list of its own.
void LoadedMethod::find_kernels() {
  const std::vector<std::string> missing = missing_operators();
  if (std::any_of(missing.begin(), missing.end(), [](const auto& op) { return has_kernel(spare_kernels, op); })) {
    const et::Span<const et::Kernel> registered = et::get_registered_kernels();
    kernels_.assign(registered.begin(), registered.end()); // complete, as ExecuTorch logs what a list lacks
    std::copy_if(spare_kernels.begin(), spare_kernels.end(), std::back_inserter(kernels_), [&](const et::Kernel& one) {
      return !has_kernel(registered, one.name_);
    });
  }
}

void LoadedMethod::find_inputs() {
  std::vector<et::EValue> values(method_->inputs_size());
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  // gives access to the inputs' memory; `check` refuses a call that does not set all of them
  const EtError error = method_->get_inputs(values.data(), values.size());
#pragma GCC diagnostic pop
  if (error != EtError::Ok) {
    throw_error_in(ErrorKind::Program, program_->path(), "method '{}': {}", name_, describe(error));
  }
  const std::vector<bool>& overlaid = program_->image().overlaid_inputs(number_);
  tensors_.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor()) {
      tensors_[i] = Input{values[i].toTensor(), values[i].toTensor().mutable_data_ptr(), overlaid[i], nullptr};
    }
  }
}

void LoadedMethod::throw_input(size_t index, const std::string& reason) const {
  std::string which = format("input {}", index);
  if (const std::string& name = input_names()[index]; !name.empty()) {
    which += format(" ('{}')", name);
  }
  throw_error_in(ErrorKind::Input, program_->path(), "method '{}': {} {}", name_, which, reason);
}

void LoadedMethod::check(const std::vector<et::EValue>& inputs) const {
  if (inputs.size() != inputs_.size()) {
    throw_error_in(
        ErrorKind::Input,
        program_->path(),
        "method '{}' takes {}{}{} were given",
        name_,
        inputs_.size(),
        inputs_.size() == 1 ? " input, " : " inputs, ",
        inputs.size());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs_[i].tag != inputs[i].tag) {
      throw_input(i, format("is {}, not {}", name_of(inputs_[i].tag), name_of(inputs[i].tag)));
    }
    if (inputs[i].isTensor()) {
      const EtTensor& given = inputs[i].toTensor();
      if (static_cast<int8_t>(given.scalar_type()) != inputs_[i].layout.scalar_type) {
        const Layout found = plain_layout(static_cast<int8_t>(given.scalar_type()), given.sizes());
        throw_input(i, format("is {}, not {}", to_string(inputs_[i].layout), to_string(found)));
      }
    }
  }
}

void LoadedMethod::set_tensor(size_t index, const EtTensor& given, bool in_place) {
  Input& input = *tensors_[index];
  EtTensor& tensor = input.tensor;
  const auto sizes = given.sizes();
  const auto now = tensor.sizes();
  if (now.size() != sizes.size() || !std::equal(sizes.begin(), sizes.end(), now.begin())) {
    // ExecuTorch itself compares only the number of elements with the largest possible one
    const auto& largest = inputs_[index].layout.sizes;
    const bool fits = now.size() == sizes.size() &&
        std::equal(sizes.begin(), sizes.end(), largest.begin(), [](int32_t a, int32_t b) { return a <= b; });
    if (!fits || et::resize_tensor(tensor, sizes) != EtError::Ok) {
      const Layout found = plain_layout(inputs_[index].layout.scalar_type, sizes);
      throw_input(index, format("is {}, not {}", to_string(inputs_[index].layout), to_string(found)));
    }
  }
  const size_t size = tensor.nbytes();
  if (!same_order(given, tensor)) {
    throw_input(index, "has its dimensions in another order in memory than the method takes");
  }
  if (size != 0 && given.const_data_ptr() == nullptr) {
    throw_input(index, "has no data");
  }
  void* data = given.mutable_data_ptr();
  if (input.overlaid || !in_place || (delegated_ && size != 0 && !has_room_behind(data, size))) {
    if (input.planned == nullptr) {
      input.copy.reset(new uint8_t[size + kRoomBehind]);
    }
    data = input.planned != nullptr ? input.planned : input.copy.get();
    if (size != 0) {
      std::memcpy(data, given.const_data_ptr(), size);
    }
  }
  tensor.unsafeGetTensorImpl()->set_data(data);
}

void LoadedMethod::set(const std::vector<et::EValue>& inputs, const std::vector<bool>& in_place) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const et::EValue& value = inputs[i];
    if (value.isTensor()) {
      set_tensor(i, value.toTensor(), i < in_place.size() && in_place[i]);
      continue;
    }
    if (!value.isNone() && !value.isScalar()) {
      throw_input(i, format("is {}, which cannot be given", name_of(value.tag)));
    }
    if (const EtError error = method_->set_input(value, i); error != EtError::Ok) {
      throw_input(i, "has another value than the program was exported with, which it cannot change");
    }
  }
}

/// Give callers the inputs that the method changed in a copy of theirs. It returns what it changes, where it changed
/// it. In the memory of an input that others overlay, there may be anything by now.
void LoadedMethod::write_back(const std::vector<et::EValue>& inputs, const std::vector<bool>& in_place) {
  for (size_t i = 0; i < inputs.size() && i < in_place.size(); ++i) {
    if (!tensors_[i] || !in_place[i] || tensors_[i]->overlaid) {
      continue;
    }
    const EtTensor& tensor = tensors_[i]->tensor;
    void* given = inputs[i].toTensor().mutable_data_ptr();
    if (tensor.const_data_ptr() == given || tensor.nbytes() == 0) {
      continue;
    }
    for (size_t output = 0; output < method_->outputs_size(); ++output) {
      const et::EValue& value = method_->get_output(output);
      if (value.isTensor() && value.toTensor().const_data_ptr() == tensor.const_data_ptr() &&
          value.toTensor().nbytes() == tensor.nbytes()) {
        std::memcpy(given, tensor.const_data_ptr(), tensor.nbytes());
        break;
      }
    }
  }
}

void LoadedMethod::forget_inputs() {
  for (auto& input : tensors_) {
    if (input) {
      input->tensor.unsafeGetTensorImpl()->set_data(input->planned);
      input->copy.reset();
    }
  }
}

/// Whether a tensor lies in this method's own memory.
bool LoadedMethod::own(const EtTensor& tensor) const {
  const auto at = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return std::any_of(spans_.begin(), spans_.end(), [&](const et::Span<uint8_t>& span) {
    const auto begin = reinterpret_cast<uintptr_t>(span.data());
    return at >= begin && at - begin <= span.size() && tensor.nbytes() <= span.size() - (at - begin);
  });
}

/// A tensor over the same memory, which holds the method.
executorch::extension::TensorPtr LoadedMethod::view_of(const EtTensor& tensor) {
  return fixed_tensor(
      {tensor.sizes().begin(), tensor.sizes().end()},
      tensor.mutable_data_ptr(),
      {tensor.dim_order().begin(), tensor.dim_order().end()},
      {tensor.strides().begin(), tensor.strides().end()},
      tensor.scalar_type(),
      [held = shared_from_this()](void*) {});
}

executorch::extension::TensorPtr LoadedMethod::output_memory(size_t index) {
  const std::lock_guard<std::mutex> turn(mutex_);
  if (index >= outputs_.size() || !outputs_[index].is_tensor()) {
    throw_error_in(ErrorKind::Input, program_->path(), "method '{}': output {} is not a tensor", name_, index);
  }
  const EtTensor& tensor = method_->get_output(index).toTensor();
  if (!own(tensor)) {
    throw_error_in(
        ErrorKind::Unsupported,
        program_->path(),
        "method '{}': output {} has no memory that was planned for it",
        name_,
        index);
  }
  viewed_.emplace(index, tensor.const_data_ptr());
  return view_of(tensor);
}

std::vector<std::pair<std::string, executorch::extension::TensorPtr>> LoadedMethod::state_memory() {
  const std::lock_guard<std::mutex> turn(mutex_);
  std::vector<std::pair<std::string, executorch::extension::TensorPtr>> found;
  const std::vector<std::string>& inputs = input_names();
  for (size_t i = 0; i < meta_.num_attributes(); ++i) {
    const auto info = meta_.attribute_tensor_meta(i);
    if (!info.ok()) {
      throw_error_in(ErrorKind::InvalidFile, program_->path(), "method '{}': {}", name_, describe(info.error()));
    }
    if (std::find(inputs.begin(), inputs.end(), info->name()) != inputs.end()) {
      continue; // ExecuTorch calls every tensor with a name an attribute
    }
    auto tensor = method_->get_attribute(info->name());
    if (tensor.ok() && own(tensor.get())) {
      found.emplace_back(info->name(), view_of(tensor.get()));
    }
  }
  return found;
}

/// Memory that callers may hold must still be the memory of the output.
void LoadedMethod::check_views() const {
  for (const auto& [index, data] : viewed_) {
    if (method_->get_output(index).toTensor().const_data_ptr() != data) {
      throw_error_in(
          ErrorKind::Execution,
          program_->path(),
          "method '{}': output {} moved to another place in memory",
          name_,
          index);
    }
  }
}

Outputs LoadedMethod::execute(const std::vector<et::EValue>& inputs, const RunOptions& options) {
  check(inputs);
  // before the mutex: a commit that waits for readers blocks new ones, so a thread that holds the mutex while it waits
  // for its Reading would deadlock with one that holds a Reading and waits for the mutex
  const BlobCache::Reading reading(*program_->cache());
  const std::lock_guard<std::mutex> turn(mutex_);
  std::unique_lock<std::mutex> state;
  if (shared_state_) {
    state = std::unique_lock<std::mutex>(*shared_state_);
  }
  struct Forget { // the caller's memory is not used afterwards, even if this throws
    LoadedMethod& method;
    ~Forget() { method.forget_inputs(); }
  } forget{*this};
  set(inputs, options.in_place);
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
        format("method '{}' failed: {}", name_, failure ? failure->reason : describe(error)),
        static_cast<int>(error));
  }
  check_views();
  write_back(inputs, options.in_place);
  Outputs outputs;
  const size_t count = std::min(options.results, method_->outputs_size());
  for (size_t i = 0; i < count; ++i) {
    add_copy(outputs, method_->get_output(i));
  }
  return outputs;
}

} // namespace blobstore::internal
