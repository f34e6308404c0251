// Programs and methods of ExecuTorch that run on a cache.
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

namespace blobstore {

/// Kinds of values that go in and come out.
enum class ValueKind { None, Tensor, Int, Double, Bool, String, Other };

/// What a method takes or gives at one position.
struct ValueInfo {
  ValueKind kind = ValueKind::None;
  Layout layout; // of a tensor; where a size may vary, the largest
  std::string name; // as recorded in the program, often empty
};

/// One argument of a call. Memory of a tensor is the caller's and is read until the call returns. It is not copied if
/// the method can read it where it is; a method that changes its input then changes it there, unless `writable` is
/// false.
struct Argument {
  ValueKind kind = ValueKind::None;
  int8_t scalar_type = 0;
  uint8_t rank = 0;
  bool writable = false;
  const void* data = nullptr;
  size_t nbytes = 0;
  int32_t sizes[16] = {}; // ExecuTorch's limit
  int64_t integer = 0; // of Int and Bool
  double real = 0;
  std::string text;
};

/// A result; the bytes are the caller's.
struct Value {
  ValueKind kind = ValueKind::None;
  Layout layout;
  std::unique_ptr<uint8_t, void (*)(void*)> data{nullptr, nullptr};
  size_t nbytes = 0;
  int64_t integer = 0;
  double real = 0;
  std::string text;
};

/// A tensor where a method keeps it. The memory is the method's and lives as long as the method does.
struct View {
  void* data = nullptr;
  Layout layout;
  size_t nbytes = 0;
};

class Method;

/// A .pte bound to a cache. It holds the cache.
class Program : public std::enable_shared_from_this<Program> {
 public:
  /// Read a program and check that the cache has whatever tensors it takes from data files.
  ///
  /// Blobs that delegates take are looked up when a method is loaded; the cache goes before what the program embeds.
  /// @throws Error FileAccess, InvalidFile, KeyNotFound, Layout, Program, Closed.
  static std::shared_ptr<Program> load(const std::string& path, std::shared_ptr<BlobCache> cache);
  virtual ~Program() = default;

  virtual const std::string& path() const = 0;
  /// The bytes of its file, mapped for as long as the program lives.
  virtual std::pair<const uint8_t*, size_t> file() const = 0;
  virtual const std::shared_ptr<BlobCache>& cache() const = 0;
  virtual const std::vector<std::string>& methods() const = 0;
  /// Keys of the tensors that a method takes from data files. @throws Error MethodNotFound.
  virtual std::vector<std::string> needs(const std::string& method) const = 0;
  virtual std::vector<ValueInfo> inputs(const std::string& method) const = 0;
  virtual std::vector<ValueInfo> outputs(const std::string& method) const = 0;
  virtual std::vector<std::string> backends(const std::string& method) const = 0;
  /// Make a method ready to run; it holds the program. Methods of one program share the memory of mutable state that
  /// was exported with share_mutable_buffers, and nothing else.
  ///
  /// @throws Error MethodNotFound, MissingBackend, KeyNotFound (a delegate's blob), Closed, Program.
  virtual std::shared_ptr<Method> load_method(const std::string& name) = 0;
};

/// A method that is ready to run.
class Method {
 public:
  virtual ~Method() = default;
  virtual const std::string& name() const = 0;
  virtual const std::vector<ValueInfo>& inputs() const = 0;
  virtual const std::vector<ValueInfo>& outputs() const = 0;
  /// Run it. Calls from several threads take turns; different methods run at the same time. The whole call sees one
  /// generation of the cache. Only the first `results` outputs are copied and returned. A fork waits for calls of other threads to end.
  ///
  /// @throws Error Input: the arguments do not fit. @throws Error Execution: it failed.
  virtual std::vector<Value> execute(const std::vector<Argument>& arguments, size_t results = SIZE_MAX) = 0;
  /// An output where the method writes it: valid before the first call, at the same address after each. An output that
  /// is a parameter has its initial value before the first call, any other is zero. Nothing orders access with calls.
  ///
  /// @throws Error Input: there is no such tensor. @throws Error Unsupported: it has no memory of the method's own.
  virtual View output_memory(size_t index) = 0;
  /// The named tensors that the method changes in memory of its own, such as mutable buffers, likewise.
  virtual std::vector<std::pair<std::string, View>> state_memory() = 0;
};

} // namespace blobstore
