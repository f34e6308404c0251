#include "program/loaded_program.h"

#include <algorithm>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/delegate.h>
#include <blobstore/reading.h>

#include "program/loaded_method.h"
#include "program/values.h"

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

LoadedProgram::LoadedProgram(const std::string& path, std::shared_ptr<BlobCache> cache)
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

std::vector<std::string> LoadedProgram::needs(const std::string& method) const {
  std::vector<std::string> keys;
  for (const Need& need : image_.needs(number(method))) {
    keys.push_back(*need.key);
  }
  return keys;
}

std::vector<std::string> LoadedProgram::backends(const std::string& method) const {
  std::vector<std::string> ids;
  for (const std::string* id : image_.backends(number(method))) {
    ids.push_back(*id);
  }
  return ids;
}

std::shared_ptr<Method> LoadedProgram::load_method(const std::string& name) {
  cache_->check_open();
  const size_t at = number(name);
  check_backends(at);
  const et::MethodMeta about = method_meta(name);
  Arenas arenas;
  std::shared_ptr<std::mutex> state;
  const BlobCache::Reading reading(*cache_); // before the mutex, as in LoadedMethod::execute
  const std::lock_guard<std::mutex> guard(mutex_);
  for (size_t i = 0; i < about.num_memory_planned_buffers(); ++i) {
    const auto size = static_cast<size_t>(about.memory_planned_buffer_size(i).get());
    if (i == 0 || methods().size() == 1) { // the first one holds no state
      arenas.push_back(make_arena(size));
    } else {
      arenas.push_back(shared_arena(i, size));
      state = state_;
    }
  }
  auto self = std::static_pointer_cast<LoadedProgram>(shared_from_this());
  return std::make_shared<LoadedMethod>(std::move(self), at, std::move(arenas), std::move(state));
}

void LoadedProgram::check_backends(size_t method) const {
  for (const std::string* id : image_.backends(method)) {
    const et::BackendInterface* backend = et::get_backend_class(id->c_str());
    if (backend == nullptr || !backend->is_available()) {
      throw Error(
          ErrorKind::MissingBackend,
          path(),
          "method '" + methods()[method] + "' is delegated to backend '" + *id + "', which this process does not have");
    }
  }
}

et::MethodMeta LoadedProgram::method_meta(const std::string& method) const {
  number(method);
  et::Result<et::MethodMeta> about = program_->method_meta(method.c_str());
  if (!about.ok()) {
    throw Error(ErrorKind::InvalidFile, path(), "method '" + method + "' is damaged: " + describe(about.error()));
  }
  return about.get();
}

size_t LoadedProgram::number(const std::string& method) const {
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

namespace blobstore {

std::shared_ptr<Program> Program::load(const std::string& path, std::shared_ptr<BlobCache> cache) {
  return std::make_shared<internal::LoadedProgram>(path, std::move(cache));
}

} // namespace blobstore
