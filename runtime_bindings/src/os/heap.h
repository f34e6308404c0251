// The memory that malloc keeps.
#pragma once

#include <cstdint>
#include <optional>

namespace blobstore::internal {

/// Give freed memory back to the system. malloc keeps it where something newer lies above. Costs time, so call it only
/// after much was freed.
void give_back_freed_memory();

/// Bytes that malloc has handed out in the whole process; empty if this system does not say.
std::optional<uint64_t> heap_bytes();

} // namespace blobstore::internal
