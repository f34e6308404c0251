// Fuzzes the reader of .safetensors files, and state dicts that are loaded from files.
#include <blobstore/tensors.h>

#include "format/safetensors.h"
#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attempt([&] {
    for (const auto& entry : blobstore::internal::read_safetensors("fuzz", data, size).entries) {
      must(entry.start <= entry.end && entry.end <= size); // inside the file
    }
  });
  const InputFile file(data, size);
  uint8_t sum = 0;
  attempt([&] {
    for (const auto& [name, tensor] : blobstore::load_state_dict(file.path())) {
      for (size_t i = 0; i < tensor->nbytes(); ++i) {
        sum ^= static_cast<const uint8_t*>(tensor->const_data_ptr())[i];
      }
    }
  });
  [[maybe_unused]] volatile const uint8_t used = sum;
  return 0;
}
