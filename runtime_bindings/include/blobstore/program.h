// ExecuTorch programs and methods that run on a cache. Values are ExecuTorch's own.
//
//   auto program = blobstore::Program::load("model.pte", cache);
//   auto outputs = program->forward(make_tensor_ptr({1, 3}, {1.0f, 2.0f, 3.0f})); // executorch::extension
//   outputs[0].toTensor();
//
//   auto decode = program->load_method("decode"); // a method by its name, to keep
//   decode->execute({tokens, position});
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/executor/method_meta.h>

#include <blobstore/cache.h>
#include <blobstore/export.h>
#include <blobstore/packed.h>

namespace blobstore BLOBSTORE_API {

/// What a call returned. Owns the memory that its values refer to: they are copies, which no later call changes. A copy
/// of an Outputs shares that memory.
///
/// Lists cannot be returned; each is None here.
class Outputs {
 public:
  using const_iterator = std::vector<executorch::runtime::EValue>::const_iterator;

  size_t size() const { return values_.size(); }
  bool empty() const { return values_.empty(); }
  /// The value at an index below `size`. Valid as long as this object.
  const executorch::runtime::EValue& operator[](size_t index) const& { return values_[index]; }
  const executorch::runtime::EValue& operator[](size_t index) && = delete; // the memory would be gone; use `tensor`
  const_iterator begin() const& { return values_.begin(); }
  const_iterator end() const& { return values_.end(); }
  /// The tensor at an index, or nullptr. It keeps its memory alive, even without this object.
  executorch::extension::TensorPtr tensor(size_t index) const;

  /// Append a value. @param memory what it refers to; for a tensor, its own TensorPtr.
  void add(executorch::runtime::EValue value, std::shared_ptr<void> memory);

 private:
  std::vector<executorch::runtime::EValue> values_;
  std::vector<std::shared_ptr<void>> memory_; // one for each value, may be null
};

/// How a method runs.
struct RunOptions {
  /// How many of the outputs are copied and returned, from the first on.
  size_t results = SIZE_MAX;
  /// For each input, whether the method may use the memory of the tensor in place if its memory plan permits it. A
  /// method that changes this input changes the caller's memory, also where it had to be copied, unless the plan lays
  /// other tensors over the input. Other inputs are copied first. Inputs beyond the end are not used in place.
  std::vector<bool> in_place;
};

class Method;

/// A .pte bound to a cache. Holds the cache.
///
/// Threads: any thread may call any function at any time. `load_method` blocks while a commit to the cache changes
/// bytes; so does `forward`, which also waits for calls of it by other threads. Nothing else blocks.
class Program : public std::enable_shared_from_this<Program> {
 public:
  /// Read a program and check that the cache has all tensors that the program takes from data files.
  ///
  /// Blobs that delegates take are looked up when a method is loaded, first in the cache and then in the program.
  /// @param packed where packed weights are kept, see packed.h. By default where the cache says, or nowhere.
  /// @throws Error FileAccess, InvalidFile, KeyNotFound, Layout, Program, Closed.
  static std::shared_ptr<Program> load(
      const std::string& path, std::shared_ptr<BlobCache> cache, const std::shared_ptr<PackedStore>& packed = nullptr);
  virtual ~Program() = default;

  virtual const std::string& path() const = 0;
  /// The bytes of its file, mapped as long as the program lives.
  virtual std::pair<const uint8_t*, size_t> file() const = 0;
  virtual const std::shared_ptr<BlobCache>& cache() const = 0;
  virtual const std::vector<std::string>& methods() const = 0;
  /// Keys of the tensors that a method takes from data files. @throws Error MethodNotFound.
  virtual std::vector<std::string> needs(const std::string& method) const = 0;
  /// The inputs and outputs of a method, without loading it. A size that may vary is given as its largest value. Refers
  /// to memory of the program. @throws Error MethodNotFound, InvalidFile.
  virtual executorch::runtime::MethodMeta method_meta(const std::string& method) const = 0;
  /// The names of a method's inputs, as the program records them; empty texts if it does not, as programs that were not
  /// lowered by `blobstore.lowering.lower`. Valid as long as the program. @throws Error MethodNotFound.
  virtual const std::vector<std::string>& input_names(const std::string& method) const = 0;
  /// The backends that parts of a method are delegated to, each once. @throws Error MethodNotFound.
  virtual std::vector<std::string> backends(const std::string& method) const = 0;
  /// Load a method, which holds the program. With a packed store, the first load of a program may load all its methods
  /// for a moment, to pack their weights. Methods of one program share the memory of mutable state that was exported
  /// with share_mutable_buffers, and nothing else.
  ///
  /// @throws Error MethodNotFound, MissingBackend, KeyNotFound (a delegate's blob), Closed, Program.
  virtual std::shared_ptr<Method> load_method(const std::string& name) = 0;
  /// Run the method "forward", which the program loads at the first call and keeps; see `Method::execute`. Calls take
  /// turns. Load a method of your own for calls that run at the same time.
  ///
  /// @throws as `load_method` and `Method::execute`.
  virtual Outputs forward(
      const std::vector<executorch::runtime::EValue>& inputs, const RunOptions& options = RunOptions()) = 0;
  /// The same with the inputs one by one: `program->forward(x, y)`.
  template <
      typename... Inputs,
      typename = std::enable_if_t<(std::is_convertible_v<const Inputs&, executorch::runtime::EValue> && ...)>>
  Outputs forward(const Inputs&... inputs) {
    return forward(std::vector<executorch::runtime::EValue>{inputs...}, RunOptions());
  }
  /// The file that delegates of the stock partitioner use. A process without this library can pass it to ExecuTorch as
  /// `packed_cache_path`, and then shares the packed weights of this program. The file has the weights of the methods
  /// that were loaded with a packed store. It is valid as long as the store keeps it, which is at least as long as one
  /// of these methods lives. @returns an empty string if no such method has a file.
  virtual std::string packed_cache_path() const = 0;
};

/// A method that is ready to run. Any thread may call any function at any time.
class Method {
 public:
  virtual ~Method() = default;
  virtual const std::string& name() const = 0;
  /// As `Program::method_meta`.
  virtual executorch::runtime::MethodMeta meta() const = 0;
  /// As `Program::input_names`.
  virtual const std::vector<std::string>& input_names() const = 0;
  /// Run the method. The whole call sees one generation of the cache. Blocks while a commit changes bytes or waits for
  /// readers, and while another thread calls this method or one that shares its state; other methods run at the same
  /// time. A fork waits until calls of other threads have ended.
  ///
  /// @param inputs tensors in the dim order of the method, numbers, bools or None. The caller owns their memory and
  ///   must keep it until the call returns; the method does not refer to it afterwards.
  /// @throws Error Input: the inputs do not fit. @throws Error Execution: the method failed.
  virtual Outputs execute(
      const std::vector<executorch::runtime::EValue>& inputs, const RunOptions& options = RunOptions()) = 0;
  /// A tensor over the memory that the method writes an output to. It keeps the method alive. Valid before the first
  /// call, and at the same address after each call. Before the first call, an output that is a parameter has its
  /// initial value; any other is zero. Access is not synchronized with calls. Waits for a call that is running.
  ///
  /// @throws Error Input: there is no such tensor. @throws Error Unsupported: the output has no memory planned by the
  /// method.
  virtual executorch::extension::TensorPtr output_memory(size_t index) = 0;
  /// The named tensors that the method changes in its own memory, such as mutable buffers; see `output_memory`.
  virtual std::vector<std::pair<std::string, executorch::extension::TensorPtr>> state_memory() = 0;
};

/// For a process that may end while its threads run methods, as one of Java: wait until none runs or loads one. A
/// thread that begins such a call later waits for ever. ExecuTorch's backends are static objects, which must not be
/// destroyed during a call, so this belongs before their end: give it to `std::atexit` when the backends are loaded.
/// Further calls do nothing.
void end_calls();

} // namespace blobstore
