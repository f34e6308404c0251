// Fuzzes the description behind a delegate's payload.
#include <cstdlib>

#include "delegate/delegate_payload.h"
#include "format/flatbuffer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const blobstore::internal::DelegatePayload payload = blobstore::internal::read_delegate_payload(data, size);
    for (const blobstore::internal::DelegateConstant& constant : payload.constants) {
      for (const uint64_t place : constant.places) {
        if (place + blobstore::internal::kKeyVersionSize > payload.size) {
          std::abort(); // a version would be written outside the payload
        }
      }
    }
    uint64_t at = 0;
    uint64_t in_holes = 0;
    for (const blobstore::internal::Hole& hole : payload.holes) {
      const uint64_t nbytes = payload.constants[hole.constant].nbytes;
      if (hole.start < at || nbytes > payload.filled || hole.start > payload.filled - nbytes) {
        std::abort(); // a blob would be written outside the payload, or over another
      }
      at = hole.start + nbytes;
      in_holes += nbytes;
    }
    if (payload.size + in_holes != payload.filled) {
      std::abort(); // more or less than the rest would be read
    }
  } catch (const blobstore::internal::FormatError&) {
  }
  return 0;
}
