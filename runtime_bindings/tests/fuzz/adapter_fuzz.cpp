// Fuzzes reading adapters, on the corpus of the reader of .ptd files.
#include <cstring>
#include <vector>

#include <executorch/runtime/platform/runtime.h>

#include <blobstore/adapters.h>
#include <blobstore/error.h>

#include "input.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  executorch::runtime::runtime_init();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const InputFile file(data, size);
  try {
    const auto adapter = blobstore::Adapter::read(file.path());
    adapter->problems();
    for (const blobstore::NamedTensor& tensor : adapter->tensors()) {
      try {
        const auto found = adapter->tensor(tensor.name);
        std::vector<uint8_t> bytes(found->nbytes());
        if (!bytes.empty()) {
          std::memcpy(bytes.data(), found->const_data_ptr(), bytes.size());
        }
      } catch (const blobstore::Error&) {
      }
    }
  } catch (const blobstore::Error&) {
  }
  try {
    blobstore::foundation_fingerprint({file.path()});
  } catch (const blobstore::Error&) {
  }
  return 0;
}
