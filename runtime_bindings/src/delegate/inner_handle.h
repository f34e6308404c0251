// The backend inside a delegate: one initialization of it, and how all initializations take turns.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/core/named_data_map.h>

#include <blobstore/error.h>

#include "delegate/arena.h"
#include "delegate/blob_names.h"
#include "delegate/inner_setup.h"

namespace blobstore::internal {

/// Memory that an inner backend packs from or goes on reading. Not owned.
struct ConstBytes {
  const void* data = nullptr;
  size_t size = 0;
};

/// A copy of some bytes, aligned for vectors, with room behind the end that backends may read.
using AlignedCopy = std::shared_ptr<uint8_t[]>;
AlignedCopy aligned_copy(const void* data, size_t size);

/// The map in which the inner backend looks for blobs: views of memory that stays, under names with versions. Does not
/// own the memory.
class PinnedMap final : public et::NamedDataMap {
 public:
  std::map<std::string, ConstBytes, std::less<>> views; // ordered, so that it can be searched without making a string

  et::Result<const et::TensorLayout> get_tensor_layout(std::string_view) const override;
  et::Result<et::FreeableBuffer> get_data(std::string_view key) const override;
  EtError load_data_into(std::string_view key, void* buffer, size_t size) const override;
  et::Result<uint32_t> get_num_keys() const override;
  et::Result<const char*> get_key(uint32_t index) const override;
};

/// The bytes of a constant for one initialization.
struct InnerConstant {
  ConstBytes view; // what to initialize with
  const void* afterwards = nullptr; // where the bytes will be, if the view does not stay
};

/// What the inner backend calls a constant.
std::string entry_name(const DelegateConstant& constant, const BlobName& name);

/// One initialization of the inner backend, and all memory that it may point into.
///
/// XNNPACK has one cache of packed weights in the whole process, and an initialization that fails leaves it unusable
/// until another succeeds. So initializations and destructions take turns here. After a failure, one of the existing
/// handles is initialized once more and dropped, and a call that failed in between is repeated.
class InnerHandle {
 public:
  /// @param names and @param constants are parallel to the constants of the payload. @param kept memory that some views
  ///   point into.
  /// @throws Failure, std::bad_alloc.
  InnerHandle(
      std::shared_ptr<const InnerSetup> setup,
      std::vector<std::shared_ptr<const BlobName>> names,
      const std::vector<InnerConstant>& constants,
      std::vector<AlignedCopy> kept,
      et::EventTracer* tracer);
  ~InnerHandle();
  InnerHandle(const InnerHandle&) = delete;
  InnerHandle& operator=(const InnerHandle&) = delete;

  EtError execute(et::BackendExecutionContext& context, et::Span<et::EValue*> arguments) const;

  /// Whether ExecuTorch has mapped the file of `PackedPlace::pages`. Versions without `packed_cache_path` do not.
  bool on_file() const { return on_file_; }
  /// Must be called when the commit whose bytes it was made from has happened.
  void settle_names() const noexcept;
  /// The delegate is being destroyed. A commit may hold one of its handles a little longer; it must not be initialized
  /// again.
  static void retire(const InnerSetup& setup);
  /// Number of initializations in this process.
  static uint64_t count();
  /// Must be called once, before any object is entered whose fork handler waits for a call to end.
  static void watch_forks();

 private:
  class Apart;
  explicit InnerHandle(const InnerHandle* other); // initialized as that one; handle_ is null if it failed
  EtError init(et::EventTracer* tracer);
  void recover() const;
  std::shared_ptr<uint8_t[]> fill() const;
  const std::string& path() const;

  std::shared_ptr<const InnerSetup> setup_;
  std::vector<std::shared_ptr<const BlobName>> names_;
  std::vector<AlignedCopy> kept_;
  Arena arena_;
  PinnedMap map_;
  std::optional<et::FreeableBuffer> processed_; // until the backend frees it
  et::DelegateHandle* handle_ = nullptr;
  bool on_file_ = false;
};

} // namespace blobstore::internal
