#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "facade/attempt.h"

namespace blobstore::internal {

// Short enough for the strings' own memory.
const Error out_of_memory(ErrorKind::FileAccess, "", "out of memory", ENOMEM);

} // namespace blobstore::internal

namespace blobstore {

void Result<void>::end_on_misuse(const Error* error) noexcept {
  if (error == nullptr) {
    std::fputs("blobstore: the error of a Result was used that has none\n", stderr);
  } else {
    std::fprintf(stderr, "blobstore: the value of a Result was used that has an error: %s\n", error->what());
  }
  std::abort();
}

} // namespace blobstore
