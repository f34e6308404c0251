// ExecuTorch programs and methods that run on a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/data_map.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

/// Kinds of inputs and outputs.
enum class ValueKind { None, Tensor, Int, Double, Bool, String, Other };

/// An input or output of a method.
struct ValueInfo {
  ValueKind kind = ValueKind::None;
  Layout layout; // of a tensor; for a size that may vary, the largest
  std::string name; // as recorded in the program; often empty
};

/// One argument of a call. The caller owns the memory of a tensor and must keep it until the call returns. It is not
/// copied if it is `writable` and the method can read it in place; a method that changes its input then changes the
/// caller's memory.
struct Argument {
  ValueKind kind = ValueKind::None;
  int8_t scalar_type = 0;
  uint8_t rank = 0;
  bool writable = false;
  const void* data = nullptr;
  size_t nbytes = 0;
  int32_t sizes[16] = {}; // ExecuTorch's limit
  int64_t integer = 0; // for Int and Bool
  double real = 0;
  std::string text;
};

/// A result. The caller owns the bytes.
struct Value {
  ValueKind kind = ValueKind::None;
  Layout layout;
  std::unique_ptr<uint8_t, void (*)(void*)> data{nullptr, nullptr};
  size_t nbytes = 0;
  int64_t integer = 0;
  double real = 0;
  std::string text;
};

/// A tensor in the memory of a method, which owns it. Valid as long as the method lives.
struct View {
  void* data = nullptr;
  Layout layout;
  size_t nbytes = 0;
};

class Method;

/// A .pte bound to a cache. Holds the cache.
///
/// Threads: any thread may call any function at any time. `load_method` blocks while a commit to the cache changes
/// bytes; nothing else blocks.
class Program : public std::enable_shared_from_this<Program> {
 public:
  /// Read a program and check that the cache has all tensors that the program takes from data files.
  ///
  /// Blobs that delegates take are looked up when a method is loaded, first in the cache and then in the program.
  /// @throws Error FileAccess, InvalidFile, KeyNotFound, Layout, Program, Closed.
  static std::shared_ptr<Program> load(const std::string& path, std::shared_ptr<BlobCache> cache);
  virtual ~Program() = default;

  virtual const std::string& path() const = 0;
  /// The bytes of its file, mapped as long as the program lives.
  virtual std::pair<const uint8_t*, size_t> file() const = 0;
  virtual const std::shared_ptr<BlobCache>& cache() const = 0;
  virtual const std::vector<std::string>& methods() const = 0;
  /// Keys of the tensors that a method takes from data files. @throws Error MethodNotFound.
  virtual std::vector<std::string> needs(const std::string& method) const = 0;
  virtual std::vector<ValueInfo> inputs(const std::string& method) const = 0;
  virtual std::vector<ValueInfo> outputs(const std::string& method) const = 0;
  virtual std::vector<std::string> backends(const std::string& method) const = 0;
  /// Load a method, which holds the program. Methods of one program share the memory of mutable state that was exported
  /// with share_mutable_buffers, and nothing else.
  ///
  /// @throws Error MethodNotFound, MissingBackend, KeyNotFound (a delegate's blob), Closed, Program.
  virtual std::shared_ptr<Method> load_method(const std::string& name) = 0;
};

/// A method that is ready to run. Any thread may call any function at any time.
class Method {
 public:
  virtual ~Method() = default;
  virtual const std::string& name() const = 0;
  virtual const std::vector<ValueInfo>& inputs() const = 0;
  virtual const std::vector<ValueInfo>& outputs() const = 0;
  /// Run the method. The whole call sees one generation of the cache. Only the first `results` outputs are copied and
  /// returned. Blocks while a commit changes bytes or waits for readers, and while another thread calls this method or
  /// one that shares its state; other methods run at the same time. A fork waits for calls of other threads to end.
  ///
  /// @throws Error Input: the arguments do not fit. @throws Error Execution: the method failed.
  virtual std::vector<Value> execute(const std::vector<Argument>& arguments, size_t results = SIZE_MAX) = 0;
  /// The memory that the method writes an output to. Valid before the first call, and at the same address after each
  /// call. Before the first call, an output that is a parameter has its initial value; any other is zero. Access is not
  /// synchronized with calls. Waits for a call that is running.
  ///
  /// @throws Error Input: there is no such tensor. @throws Error Unsupported: the output has no memory planned by the
  /// method.
  virtual View output_memory(size_t index) = 0;
  /// As `output_memory`, the named tensors that the method changes in its own memory, such as mutable buffers.
  virtual std::vector<std::pair<std::string, View>> state_memory() = 0;
};

} // namespace blobstore
