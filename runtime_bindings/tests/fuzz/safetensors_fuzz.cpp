// Fuzzes the reader of .safetensors files, and state dicts that are loaded from files.
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/error.h>
#include <blobstore/tensors.h>

#include "format/safetensors.h"
#include "input.h"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  executorch::runtime::runtime_init();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    for (const auto& entry : blobstore::internal::read_safetensors("fuzz", data, size).entries) {
      if (entry.start > entry.end || entry.end > size) {
        std::abort(); // a tensor outside the file
      }
    }
  } catch (const blobstore::Error&) {
  }
  const InputFile file(data, size);
  uint8_t sum = 0;
  try {
    for (const auto& [name, tensor] : blobstore::load_state_dict(file.path())) {
      for (size_t i = 0; i < tensor->nbytes(); ++i) {
        sum ^= static_cast<const uint8_t*>(tensor->const_data_ptr())[i];
      }
    }
  } catch (const blobstore::Error&) {
  }
  [[maybe_unused]] volatile const uint8_t used = sum;
  return 0;
}
