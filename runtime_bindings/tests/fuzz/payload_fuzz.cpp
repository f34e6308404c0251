// Fuzzes the description behind a delegate's payload.
#include "delegate/delegate_payload.h"
#include "format/flatbuffer.h"
#include "input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  attempt<blobstore::internal::FormatError>([&] {
    const blobstore::internal::DelegatePayload payload = blobstore::internal::read_delegate_payload(data, size);
    for (const blobstore::internal::DelegateConstant& constant : payload.constants) {
      for (const uint64_t place : constant.places) {
        must(place + blobstore::internal::kKeyVersionSize <= payload.size); // a version is written there
      }
    }
    uint64_t at = 0;
    uint64_t in_holes = 0;
    for (const blobstore::internal::Hole& hole : payload.holes) {
      const uint64_t nbytes = payload.constants[hole.constant].nbytes;
      // a blob is written inside the payload, and over no other
      must(hole.start >= at && nbytes <= payload.filled && hole.start <= payload.filled - nbytes);
      at = hole.start + nbytes;
      in_holes += nbytes;
    }
    must(payload.size + in_holes == payload.filled); // the rest is read
  });
  return 0;
}
