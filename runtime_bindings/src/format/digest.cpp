#include "format/digest.h"

#include <cstring>
#include <new>

#include "format/digest_avx2.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace blobstore::internal {
namespace {

#ifdef BLOBSTORE_AVX2
/// Whether wide vectors are there, and make as many bytes faster.
bool are_wide(size_t size) {
  return size >= 512 && __builtin_cpu_supports("avx2") != 0;
}
#endif

Digest canonical(XXH128_hash_t hash) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, hash);
  Digest out;
  static_assert(sizeof(canonical.digest) == sizeof(out));
  std::memcpy(out.data(), canonical.digest, out.size());
  return out;
}

XXH3_state_t* as_state(void* state) {
  return static_cast<XXH3_state_t*>(state);
}

} // namespace

Digest digest(const void* data, size_t size) {
#ifdef BLOBSTORE_AVX2
  if (are_wide(size)) {
    XXH128_hash_t hash;
    hash_avx2(&hash, data, size);
    return canonical(hash);
  }
#endif
  return canonical(XXH3_128bits(data, size));
}

Hasher::Hasher() : state_(XXH3_createState(), [](void* state) { XXH3_freeState(as_state(state)); }) {
  if (state_ == nullptr) {
    throw std::bad_alloc();
  }
  XXH3_128bits_reset(as_state(state_.get()));
}

void Hasher::update(const void* data, size_t size) {
#ifdef BLOBSTORE_AVX2
  if (are_wide(size)) {
    update_avx2(state_.get(), data, size);
    return;
  }
#endif
  XXH3_128bits_update(as_state(state_.get()), data, size);
}

Digest Hasher::digest() const {
  return canonical(XXH3_128bits_digest(as_state(state_.get())));
}

std::string hexadecimal(const uint8_t* bytes, size_t size) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

std::string to_string(const Digest& digest) {
  return hexadecimal(digest.data(), digest.size());
}

} // namespace blobstore::internal
