// The memory that malloc keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace blobstore::internal {

/// New memory, not initialized. It begins at a line of the processor's cache. If it is large, it consists of huge pages
/// where the system has some: it takes one fault to get 512 pages, and faults take longer than filling the pages.
std::shared_ptr<uint8_t[]> make_memory(size_t size);

/// Give freed memory back to the system. malloc keeps it where something newer lies above. Costs time, so call it only
/// after much was freed.
void give_back_freed_memory();

} // namespace blobstore::internal
