// Fuzzes the description behind a delegate's payload.
#include <cstdlib>

#include "delegate/delegate_payload.h"
#include "format/flatbuffer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const blobstore::internal::DelegatePayload payload = blobstore::internal::read_delegate_payload(data, size);
    for (const blobstore::internal::DelegateConstant& constant : payload.constants) {
      for (const uint64_t place : constant.places) {
        if (place + blobstore::internal::kVersionSize > payload.size) {
          std::abort(); // a version would be written outside the payload
        }
      }
    }
  } catch (const blobstore::internal::FormatError&) {
  }
  return 0;
}
