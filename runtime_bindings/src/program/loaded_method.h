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

#include <blobstore/program.h>

#include "os/arena.h"
#include "os/fork.h"
#include "os/process_end.h"
#include "program/loaded_program.h"

namespace blobstore::internal {

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
  struct Input { // a tensor
    executorch::aten::Tensor tensor;
    void* planned; // where its memory was planned; null if it always uses the caller's
    bool overlaid; // other tensors lie there too, and may be views of it
  };

  void load();
  [[noreturn]] void throw_load_error(executorch::runtime::Error error, const CacheDataMap::Misses& misses) const;
  std::string missing_operators() const;
  void find_inputs();
  void check(const std::vector<Argument>& arguments) const;
  void set(const std::vector<Argument>& arguments);
  void set_tensor(size_t index, const Argument& argument);
  void forget_inputs();
  bool may_share(const Argument& argument) const;
  bool own(const executorch::aten::Tensor& tensor) const;
  void check_views() const;
  Error input_error(size_t index, const std::string& reason) const;

  void after_fork_in_child() override {
    renew(mutex_);
    if (shared_state_) {
      renew(*shared_state_); // each method that shares it does so, before any of them runs
    }
  }

  std::shared_ptr<LoadedProgram> program_;
  size_t number_;
  std::string name_;
  std::vector<ValueInfo> inputs_;
  std::vector<ValueInfo> outputs_;
  Arenas arenas_;
  std::vector<executorch::runtime::Span<uint8_t>> spans_;
  Arena allocator_;
  Arena temporary_;
  std::unique_ptr<executorch::runtime::HierarchicalAllocator> planned_;
  std::unique_ptr<executorch::runtime::MemoryManager> manager_;
  std::optional<executorch::runtime::Method> method_;
  std::vector<std::optional<Input>> tensors_;
  bool delegated_ = false;
  std::map<size_t, const void*> viewed_; // outputs whose memory callers may hold: index -> address
  std::mutex mutex_; // one call at a time
  std::shared_ptr<std::mutex> shared_state_; // held by calls of all methods that use the same memory; may be null
};

} // namespace blobstore::internal
