// The backend inside a delegate: one initialization of it, and the order in which all of them happen.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/error.h>

#include "os/arena.h"
#include "delegate/blob_names.h"
#include "delegate/delegate_payload.h"

namespace blobstore {

/// Thrown inside the delegate; never leaves it.
struct Failure {
  executorch::runtime::Error code;
  ErrorKind kind;
  std::string reason;
};

/// Memory that an inner backend packs from, or goes on reading.
struct ConstBytes {
  const void* data = nullptr;
  size_t size = 0;
};

/// A copy of some bytes, aligned as backends like it, with room behind that they may read.
class AlignedCopy {
 public:
  /// @throws std::bad_alloc.
  AlignedCopy(const void* data, size_t size);
  uint8_t* data() const { return memory_.get(); }
  uint8_t* release() { return memory_.release(); } // for std::free

 private:
  std::unique_ptr<uint8_t, void (*)(void*)> memory_;
};

/// What the inner backend finds blobs in: views of memory that stays, under names that say the version.
class PinnedMap final : public executorch::runtime::NamedDataMap {
 public:
  std::map<std::string, ConstBytes, std::less<>> views; // ordered, as it is searched without making a string

  executorch::runtime::Result<const executorch::runtime::TensorLayout> get_tensor_layout(
      std::string_view) const override;
  executorch::runtime::Result<executorch::runtime::FreeableBuffer> get_data(std::string_view key) const override;
  executorch::runtime::Error load_data_into(std::string_view key, void* buffer, size_t size) const override;
  executorch::runtime::Result<uint32_t> get_num_keys() const override;
  executorch::runtime::Result<const char*> get_key(uint32_t index) const override;
};

/// What all initializations of one delegate have in common.
struct InnerRecipe {
  executorch::runtime::BackendInterface* backend = nullptr;
  DelegatePayload payload;
  std::vector<uint8_t> bytes; // the inner payload
  std::string method;
  std::vector<executorch::runtime::CompileSpec> specs; // they point into the program
  std::vector<executorch::runtime::BackendOption> options;
  mutable bool retired = false; // in a turn of InnerHandle: the delegate is gone, and with it what `specs` point into
};

/// The bytes of a constant for one initialization.
struct InnerConstant {
  ConstBytes view; // what to initialize with
  const void* afterwards = nullptr; // where these bytes are later, if the view does not stay; the backend has its copy
};

/// One initialization of the inner backend, and all that it may point into.
///
/// XNNPACK shares one cache of packed weights in the whole process, and an initialization that fails leaves it unusable
/// for all until one succeeds. So initializations and destructions take turns here, and after a failure one of the
/// handles that exist is initialized once more, and dropped; a call that came too early is made again.
class InnerHandle {
 public:
  /// @param names parallel to the constants, as is `constants`; @param kept memory that some views point into.
  /// @throws Failure, std::bad_alloc.
  InnerHandle(
      std::shared_ptr<const InnerRecipe> recipe,
      std::vector<std::shared_ptr<const BlobName>> names,
      const std::vector<InnerConstant>& constants,
      std::vector<AlignedCopy> kept,
      executorch::runtime::EventTracer* tracer);
  ~InnerHandle();
  InnerHandle(const InnerHandle&) = delete;
  InnerHandle& operator=(const InnerHandle&) = delete;

  executorch::runtime::Error execute(
      executorch::runtime::BackendExecutionContext& context,
      executorch::runtime::Span<executorch::runtime::EValue*> arguments) const;

  /// The commit whose bytes it was made from has happened.
  void settle_names() const noexcept;
  /// The delegate goes; a commit may hold a handle of it for a little longer, which nobody is to initialize again.
  static void retire(const InnerRecipe& recipe);
  /// How often an inner backend was initialized in this process.
  static uint64_t count();
  /// To be called once, before any object that forks and waits for a call to end.
  static void watch_forks();

 private:
  explicit InnerHandle(const InnerHandle* other); // initialized as that one; handle_ is null if it failed
  executorch::runtime::Error init(executorch::runtime::EventTracer* tracer);
  void recover() const;

  std::shared_ptr<const InnerRecipe> recipe_;
  std::vector<std::shared_ptr<const BlobName>> names_;
  std::vector<AlignedCopy> kept_;
  Arena arena_;
  PinnedMap map_;
  executorch::runtime::DelegateHandle* handle_ = nullptr;
};

} // namespace blobstore
