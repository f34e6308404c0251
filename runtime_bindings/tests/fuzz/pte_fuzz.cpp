// Fuzzes the reading of programs, and the binding of their tensors to a cache. BLOBSTORE_FUZZ_DATA names the file of
// the cache, which has the tensors that valid programs take.
#include <blobstore/cache.h>

#include "input.h"
#include "program/program_image.h"

namespace {

std::shared_ptr<blobstore::BlobCache> cache;

} // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* path = std::getenv("BLOBSTORE_FUZZ_DATA");
  cache = path == nullptr ? blobstore::BlobCache::open({}) : blobstore::BlobCache::open({path});
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const InputFile file(data, size);
  attempt([&] {
    blobstore::internal::ProgramImage image(file.path());
    for (size_t method = 0; method < image.methods().size(); ++method) {
      image.backends(method);
      image.operators(method);
      image.overlaid_inputs(method);
    }
    image.bind(*cache);
  });
  return 0;
}
