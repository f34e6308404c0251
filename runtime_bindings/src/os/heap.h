// The memory that malloc keeps.
#pragma once

namespace blobstore::internal {

/// Give freed memory back to the system. malloc keeps it where something newer lies above. Costs time, so call it only
/// after much was freed.
void give_back_freed_memory();

} // namespace blobstore::internal
