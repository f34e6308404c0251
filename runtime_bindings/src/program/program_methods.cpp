// The methods of a program: the memory that they are planned into, and which of them `forward` keeps.
#include <algorithm>

#include <blobstore/reading.h>

#include "program/loaded_method.h"
#include "program/loaded_program.h"

namespace blobstore::internal {

namespace et = executorch::runtime;

namespace {

/// The memory begins 64 bytes into a page, so that a tensor of whole pages does not end at the end of a page. A
/// delegate that packs trained parameters from here, when they are published, reads beyond the end of the tensor; this
/// way it stays on a mapped page, and no copy is needed.
std::shared_ptr<Mapping> make_arena(size_t size) {
  return std::make_shared<Mapping>(size, 64);
}

} // namespace

std::shared_ptr<Method> LoadedProgram::load_method(const std::string& name) {
  cache_->check_open();
  const size_t at = number(name);
  check_backends(at);
  if (kPackedStores && packed_ != nullptr) {
    return load_packed(at);
  }
  LoadResult nothing;
  return make_method(at, State::Shared, LoadPlan(), nothing);
}

Outputs LoadedProgram::forward(const std::vector<et::EValue>& inputs, const RunOptions& options) {
  std::shared_ptr<Method> method;
  {
    const std::lock_guard<std::mutex> guard(forward_mutex_);
    method = forward_;
  }
  if (method == nullptr) {
    // Without the mutex: a thread that holds a Reading may wait for it, and loading waits for commits that wait for
    // Readings. If two threads load at once, one method is kept.
    const std::shared_ptr<Method> loaded = load_method("forward");
    static_cast<LoadedMethod&>(*loaded).leave_to_program();
    const std::lock_guard<std::mutex> guard(forward_mutex_);
    if (forward_ == nullptr) {
      forward_ = loaded;
    }
    method = forward_;
  }
  return method->execute(inputs, options);
}

/// @param kept whether the method's state lies where that of the other methods does.
std::shared_ptr<Method> LoadedProgram::make_method(size_t at, State kept, const LoadPlan& plan, LoadResult& result) {
  const et::MethodMeta about = method_meta(methods()[at]);
  Arenas arenas;
  std::shared_ptr<std::mutex> state;
  const BlobCache::Reading reading(*cache_); // before the mutex, as in LoadedMethod::execute
  const std::lock_guard<std::mutex> guard(mutex_);
  for (size_t i = 0; i < about.num_memory_planned_buffers(); ++i) {
    const auto size = static_cast<size_t>(about.memory_planned_buffer_size(i).get());
    if (i == 0 || methods().size() == 1 || kept == State::Own) { // the first one holds no state
      arenas.push_back(make_arena(size));
    } else {
      arenas.push_back(shared_arena(i, size));
      state = state_;
    }
  }
  auto self = std::static_pointer_cast<LoadedProgram>(shared_from_this());
  return std::make_shared<LoadedMethod>(std::move(self), at, std::move(arenas), std::move(state), plan, result);
}

/// Memory for planned buffer `index` of all methods, as large as the largest of them needs.
std::shared_ptr<Mapping> LoadedProgram::shared_arena(size_t index, size_t size) {
  for (const std::string& method : methods()) {
    const et::MethodMeta about = method_meta(method);
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

} // namespace blobstore::internal
