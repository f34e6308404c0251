#include "os/heap.h"

#include <cstdlib> // defines __GLIBC__

#include <sys/mman.h>

#include "os/file.h"
#include "os/platform.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace blobstore::internal {

std::shared_ptr<uint8_t[]> make_memory(size_t size) {
  constexpr size_t kLine = 64;
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t alignment = BLOBSTORE_LINUX && size >= kHugePage ? kHugePage : kLine;
  // malloc gets a new map for each large aligned allocation, but reuses the memory of others
  const std::shared_ptr<uint8_t[]> whole(new uint8_t[size + alignment - 1]);
  const auto start = reinterpret_cast<uintptr_t>(whole.get());
  uint8_t* const memory = whole.get() + (align_up(start, alignment) - start);
#if BLOBSTORE_LINUX
  if (alignment == kHugePage) {
    madvise(memory, align_down(size, kHugePage), MADV_HUGEPAGE); // without huge pages, the advice does nothing
  }
#endif
  return std::shared_ptr<uint8_t[]>(whole, memory);
}

void give_back_freed_memory() {
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

} // namespace blobstore::internal
