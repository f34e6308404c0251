// A method of a program that ExecuTorch has loaded.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/operator_registry.h>

#include <blobstore/program.h>

#include "delegate/arena.h"
#include "os/fork.h"
#include "os/process_end.h"
#include "program/loaded_program.h"
#include "program/values.h"

namespace blobstore::internal {

/// Kernels for operators of which ExecuTorch has none. Set before the first program is loaded, and never freed.
inline executorch::runtime::Span<const executorch::runtime::Kernel> spare_kernels;

class LoadedMethod final : public Method, public std::enable_shared_from_this<LoadedMethod>, private ForkAware {
 public:
  LoadedMethod(
      std::shared_ptr<LoadedProgram> program,
      size_t number,
      Arenas arenas,
      std::shared_ptr<std::mutex> state,
      const LoadPlan& plan,
      LoadResult& result);
  ~LoadedMethod() override {
    leave();
    const BackendWork work;
    method_.reset();
  }

  /// Hold the program no longer, because it holds this method.
  void leave_to_program() { program_ = {std::shared_ptr<void>(), program_.get()}; }

  const std::string& name() const override { return name_; }
  executorch::runtime::MethodMeta meta() const override { return meta_; }
  const std::vector<std::string>& input_names() const override { return program_->image().input_names(number_); }
  Outputs execute(const std::vector<executorch::runtime::EValue>& inputs, const RunOptions& options) override;
  executorch::extension::TensorPtr output_memory(size_t index) override;
  std::vector<std::pair<std::string, executorch::extension::TensorPtr>> state_memory() override;

 private:
  struct Input { // a tensor
    executorch::aten::Tensor tensor;
    void* planned; // where its memory was planned, or null
    bool overlaid; // other tensors lie there too, and may be views of it
    std::unique_ptr<uint8_t[]> copy; // during a call, if the caller's memory is not used and none was planned
  };

  void load(const LoadPlan& plan, LoadResult& result);
  [[noreturn]] void throw_load_error(executorch::runtime::Error error, const CacheDataMap::Misses& misses) const;
  std::vector<std::string> missing_operators() const;
  void find_kernels();
  void find_inputs();
  void check(const std::vector<executorch::runtime::EValue>& inputs) const;
  void set(const std::vector<executorch::runtime::EValue>& inputs, const std::vector<bool>& in_place);
  void set_tensor(size_t index, const executorch::aten::Tensor& given, bool in_place);
  void write_back(const std::vector<executorch::runtime::EValue>& inputs, const std::vector<bool>& in_place);
  void forget_inputs();
  executorch::extension::TensorPtr view_of(const executorch::aten::Tensor& tensor);
  bool own(const executorch::aten::Tensor& tensor) const;
  void check_views() const;
  [[noreturn]] void throw_input(size_t index, const std::string& reason) const;

  void after_fork_in_child() override {
    renew(mutex_);
    if (shared_state_) {
      renew(*shared_state_); // each method that shares it does so, before any of them runs
    }
  }

  std::shared_ptr<LoadedProgram> program_;
  size_t number_;
  std::string name_;
  executorch::runtime::MethodMeta meta_;
  std::vector<ValueInfo> inputs_;
  std::vector<ValueInfo> outputs_;
  Arenas arenas_;
  std::vector<executorch::runtime::Span<uint8_t>> spans_;
  Arena allocator_;
  Arena temporary_;
  std::shared_ptr<const PackedLease> stock_packed_; // what XNNPACK's own delegates map
  std::shared_ptr<PackedCopy> stock_copy_; // what keeps it up to date, if it belongs to a working copy
  std::unique_ptr<executorch::runtime::HierarchicalAllocator> planned_;
  std::unique_ptr<executorch::runtime::MemoryManager> manager_;
  std::vector<executorch::runtime::Kernel> kernels_; // all that ExecuTorch has, and spare ones; empty if it has enough
  std::optional<executorch::runtime::Method> method_;
  std::vector<std::optional<Input>> tensors_;
  bool delegated_ = false;
  std::map<size_t, const void*> viewed_; // outputs whose memory callers may hold: index -> address
  std::mutex mutex_; // one call at a time
  std::shared_ptr<std::mutex> shared_state_; // held by calls of all methods that use the same memory; may be null
};

} // namespace blobstore::internal
