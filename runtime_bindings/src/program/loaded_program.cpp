#include "program/loaded_program.h"

#include <algorithm>
#include <atomic>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/delegate.h>

#include "os/process_end.h"
#include "os/text.h"
#include "program/values.h"

namespace blobstore::internal {

namespace et = executorch::runtime;

namespace {

/// All of this process.
struct List : ForkAware {
  std::mutex mutex;
  std::vector<std::weak_ptr<const LoadedProgram>> all;
  std::atomic<uint64_t> changes{0};

  static List& get() {
    static auto* list = new List; // programs may be destroyed while the process ends, in any order
    return *list;
  }

  List() { enter(); }

  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override { renew(mutex); }

  void add(const std::shared_ptr<const LoadedProgram>& program) {
    const std::lock_guard<std::mutex> guard(mutex);
    all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }), all.end());
    all.push_back(program);
    changes.fetch_add(1);
  }
};

} // namespace

std::vector<std::shared_ptr<const LoadedProgram>> programs_on(const BlobCache& cache) {
  std::vector<std::shared_ptr<const LoadedProgram>> living;
  {
    List& list = List::get();
    const std::lock_guard<std::mutex> guard(list.mutex);
    for (const auto& one : list.all) {
      if (auto program = one.lock()) {
        living.push_back(std::move(program));
      }
    }
  }
  std::vector<std::shared_ptr<const LoadedProgram>> found;
  for (auto& program : living) {
    for (const BlobCache* at = program->cache().get(); at != nullptr; at = at->base().get()) {
      if (at == &cache) {
        found.push_back(std::move(program));
        break;
      }
    }
  }
  return found;
}

uint64_t program_changes() {
  return List::get().changes.load();
}

LoadedProgram::~LoadedProgram() {
  leave();
  List::get().changes.fetch_add(1);
}

const ProgramParts& LoadedProgram::parts() const {
  std::call_once(parts_read_, [&] {
    const auto [data, size] = file();
    parts_ = read_program_parts(path(), data, size);
  });
  return parts_;
}

LoadedProgram::LoadedProgram(
    const std::string& path, std::shared_ptr<BlobCache> cache, std::shared_ptr<PackedFolder> packed)
    : cache_(std::move(cache)), packed_(std::move(packed)), image_(path), loader_(image_), map_(cache_) {
  et::runtime_init();
  register_delegate();
  cache_->check_open();
  image_.bind(*cache_);
  et::Result<et::Program> loaded = et::Program::load(&loader_, et::Program::Verification::InternalConsistency);
  if (!loaded.ok()) {
    throw_error_in(ErrorKind::InvalidFile, path, "not a valid program: {}", describe(loaded.error()));
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

const std::vector<std::string>& LoadedProgram::input_names(const std::string& method) const {
  return image_.input_names(number(method));
}

bool LoadedProgram::uses(size_t method, const char* backend) const {
  const auto& ids = image_.backends(method);
  return std::any_of(ids.begin(), ids.end(), [&](const std::string* id) { return *id == backend; });
}

void LoadedProgram::check_backends(size_t method) const {
  for (const std::string* id : image_.backends(method)) {
    const et::BackendInterface* backend = et::get_backend_class(id->c_str());
    if (backend == nullptr || !backend->is_available()) {
      throw_error_in(
          ErrorKind::MissingBackend,
          path(),
          "method '{}' is delegated to backend '{}', which this process does not have",
          methods()[method],
          *id);
    }
  }
}

et::MethodMeta LoadedProgram::method_meta(const std::string& method) const {
  number(method);
  et::Result<et::MethodMeta> about = program_->method_meta(method.c_str());
  if (!about.ok()) {
    throw_error_in(ErrorKind::InvalidFile, path(), "method '{}' is damaged: {}", method, describe(about.error()));
  }
  return about.get();
}

size_t LoadedProgram::number(const std::string& method) const {
  const auto found = std::find(methods().begin(), methods().end(), method);
  if (found == methods().end()) {
    throw_error_in(ErrorKind::MethodNotFound, path(), "no method '{}'; there are {}", method, in_quotes(methods()));
  }
  return static_cast<size_t>(found - methods().begin());
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

std::shared_ptr<Program> Program::load(
    const std::string& path, std::shared_ptr<BlobCache> cache, const std::shared_ptr<PackedStore>& packed) {
  auto folder = std::static_pointer_cast<internal::PackedFolder>(packed != nullptr ? packed : cache->packed());
  auto program = std::make_shared<internal::LoadedProgram>(path, std::move(cache), std::move(folder));
  internal::List::get().add(program);
  return program;
}

void end_calls() {
  static std::atomic<bool> ended{false};
  if (!ended.exchange(true)) {
    internal::end_backend_work();
  }
}

} // namespace blobstore
