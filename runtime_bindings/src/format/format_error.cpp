#include "format/format_error.h"

namespace blobstore::internal {

void throw_format_shown(const char* reason, uint64_t kinds, const Shown* values) {
  throw FormatError(format_shown(reason, kinds, values));
}

} // namespace blobstore::internal
