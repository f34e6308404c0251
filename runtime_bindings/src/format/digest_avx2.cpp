// Compiled for processors with AVX2, so it includes nothing whose inline functions others might be given in its form.
#ifdef BLOBSTORE_AVX2

#include "format/digest_avx2.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace blobstore::internal {

void hash_avx2(void* hash, const void* data, size_t size) {
  *static_cast<XXH128_hash_t*>(hash) = XXH3_128bits(data, size);
}

void update_avx2(void* state, const void* data, size_t size) {
  XXH3_128bits_update(static_cast<XXH3_state_t*>(state), data, size);
}

} // namespace blobstore::internal

#endif
