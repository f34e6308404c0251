#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

#include "facade/attempt.h"

namespace blobstore::internal {
namespace {

// Made when the library is loaded, so that it needs no memory later: the texts fit into the strings themselves.
const Error out_of_memory(ErrorKind::FileAccess, "", "out of memory", ENOMEM);

} // namespace

Error caught() noexcept {
  try {
    throw;
  } catch (Error& error) {
    return std::move(error);
  } catch (const std::bad_alloc&) {
    return out_of_memory;
  }
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

void Result<void>::end_on_misuse(const Error* error) noexcept {
  if (error == nullptr) {
    std::fputs("blobstore: the error of a Result was used that has none\n", stderr);
  } else {
    std::fprintf(stderr, "blobstore: the value of a Result was used that has an error: %s\n", error->what());
  }
  std::abort();
}

} // namespace blobstore
