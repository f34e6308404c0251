// Memory for objects that live as long as a method: taken in large pieces, given back at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <executorch/runtime/core/memory_allocator.h>

namespace blobstore::internal {

/// An allocator that cannot free single objects. A method with 20,000 tensors allocates several objects for each. Not
/// thread-safe.
class Arena final : public executorch::runtime::MemoryAllocator {
 public:
  Arena() : MemoryAllocator(0, nullptr) {}

  void* allocate(size_t size, size_t alignment = kDefaultAlignment) override {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
      return nullptr;
    }
    uintptr_t at = (next_ + alignment - 1) & ~(alignment - 1);
    if (at < next_ || at > end_ || size > end_ - at) {
      const size_t room = size + alignment;
      if (room < size) {
        return nullptr;
      }
      const size_t piece = std::max(room, piece_);
      piece_ = std::min<size_t>(2 * piece_, 1 << 20);
      std::unique_ptr<uint8_t[]> memory(new (std::nothrow) uint8_t[piece]);
      if (memory == nullptr) {
        return nullptr;
      }
      next_ = reinterpret_cast<uintptr_t>(memory.get());
      end_ = next_ + piece;
      pieces_.push_back(std::move(memory));
      at = (next_ + alignment - 1) & ~(alignment - 1);
    }
    next_ = at + size;
    return reinterpret_cast<void*>(at);
  }

  /// Free all objects. A single piece is kept for what comes next; if there are several, all are given back.
  void reset() override {
    if (pieces_.size() > 1) {
      pieces_.clear();
      next_ = end_ = 0;
    } else if (!pieces_.empty()) {
      next_ = reinterpret_cast<uintptr_t>(pieces_.back().get());
    }
  }

 private:
  std::vector<std::unique_ptr<uint8_t[]>> pieces_;
  uintptr_t next_ = 0;
  uintptr_t end_ = 0;
  size_t piece_ = 1 << 12;
};

} // namespace blobstore::internal
