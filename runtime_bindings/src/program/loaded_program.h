// A .pte that ExecuTorch has loaded, bound to a cache.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <executorch/runtime/executor/program.h>

#include <blobstore/data_map.h>
#include <blobstore/program.h>

#include "format/digest.h"
#include "os/file.h"
#include "os/fork.h"
#include "packed/load_plan.h"
#include "program/image_loader.h"
#include "program/program_image.h"
#include "program/program_parts.h"

namespace blobstore::internal {

/// The memory that a method's tensors are planned into.
using Arenas = std::vector<std::shared_ptr<Mapping>>;

class LoadedProgram final : public Program, private ForkAware {
 public:
  /// @param packed may be null.
  LoadedProgram(const std::string& path, std::shared_ptr<BlobCache> cache, std::shared_ptr<PackedFolder> packed);
  ~LoadedProgram() override;

  const std::string& path() const override { return image_.path(); }
  std::pair<const uint8_t*, size_t> file() const override {
    return {image_.whole().data(), static_cast<size_t>(image_.file_size())};
  }
  const std::shared_ptr<BlobCache>& cache() const override { return cache_; }
  const std::vector<std::string>& methods() const override { return image_.methods(); }
  std::vector<std::string> needs(const std::string& method) const override;
  executorch::runtime::MethodMeta method_meta(const std::string& method) const override;
  const std::vector<std::string>& input_names(const std::string& method) const override;
  std::vector<std::string> backends(const std::string& method) const override;
  std::shared_ptr<Method> load_method(const std::string& name) override;
  using Program::forward;
  Outputs forward(const std::vector<executorch::runtime::EValue>& inputs, const RunOptions& options) override;
  std::string packed_cache_path() const override;

  const executorch::runtime::Program& program() const { return *program_; }
  const ProgramImage& image() const { return image_; }
  const CacheDataMap& map() const { return map_; }
  /// Read when they are first asked for. @throws Error InvalidFile.
  const ProgramParts& parts() const;

 private:
  size_t number(const std::string& method) const;
  void check_backends(size_t method) const;
  bool uses(size_t method, const char* backend) const;
  // program_methods.cpp
  enum class State { Shared, Own };
  std::shared_ptr<Method> make_method(size_t method, State state, const LoadPlan& plan, LoadResult& result);
  std::shared_ptr<Mapping> shared_arena(size_t index, size_t size);

  // packed_methods.cpp
  enum class Found { InFile, OnHeap, Missing };
  std::shared_ptr<Method> load_packed(size_t method);
  LoadPlan plan_load(size_t method) const;
  void plan_stock(Packing& stock, const Digest& runtime) const;
  bool packs_in_one_way() const;
  const Digest& file_digest() const;
  Found look_up(size_t method, Packing& packing) const;
  std::shared_ptr<Method> load_on_files(size_t method, LoadPlan plan, bool whole);
  std::shared_ptr<Method> load_or_build(size_t method, LoadPlan& plan);
  void pack_all(LoadPlan& plan);

  void after_fork_in_child() override {
    renew(mutex_);
    renew(forward_mutex_);
  }

  std::shared_ptr<BlobCache> cache_;
  std::shared_ptr<PackedFolder> packed_; // may be null
  ProgramImage image_;
  ImageLoader loader_;
  CacheDataMap map_;
  std::optional<executorch::runtime::Program> program_;
  mutable std::once_flag parts_read_;
  mutable ProgramParts parts_;
  mutable std::once_flag ways_read_;
  mutable bool one_way_ = true;
  mutable std::once_flag hashed_;
  mutable Digest digest_{}; // of the file
  std::mutex mutex_; // guards shared_
  Arenas shared_;
  std::shared_ptr<std::mutex> state_ = std::make_shared<std::mutex>(); // for calls of methods that use shared_
  std::mutex forward_mutex_; // guards forward_
  std::shared_ptr<Method> forward_; // for `forward`; does not hold this program, and is destroyed first
};

/// The programs that are loaded now on a cache or on a cache above it, in the order in which they were loaded. A
/// program counts as long as one of its methods lives.
std::vector<std::shared_ptr<const LoadedProgram>> programs_on(const BlobCache& cache);
/// Grows with every change of what `programs_on` returns, of any cache.
uint64_t program_changes();

} // namespace blobstore::internal
