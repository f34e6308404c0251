// Fuzzes reading adapters, on the corpus of the reader of .ptd files.
#include <cstring>
#include <vector>

#include <blobstore/adapters.h>

#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const InputFile file(data, size);
  attempt([&] {
    const auto adapter = blobstore::Adapter::read(file.path());
    adapter->problems();
    for (const blobstore::NamedTensor& tensor : adapter->tensors()) {
      attempt([&] {
        const auto found = adapter->tensor(tensor.name);
        std::vector<uint8_t> bytes(found->nbytes());
        if (!bytes.empty()) {
          std::memcpy(bytes.data(), found->const_data_ptr(), bytes.size());
        }
      });
    }
  });
  attempt([&] { blobstore::foundation_fingerprint({file.path()}); });
  return 0;
}
