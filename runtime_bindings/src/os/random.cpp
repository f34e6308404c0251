#include "os/random.h"

#include <cerrno>
#include <cstdlib>
#include <system_error>

#include <unistd.h>

namespace blobstore::internal {
namespace {

/// Not std::random_device, which asks the processor what it can, and so leaves a virtual machine, each time.
void fill(void* bytes, size_t size) {
#if defined(__APPLE__)
  arc4random_buf(bytes, size); // iOS has no getentropy for applications
#else
  if (getentropy(bytes, size) != 0) {
    throw std::system_error(errno, std::generic_category(), "getentropy");
  }
#endif
}

} // namespace

uint64_t random_word() {
  uint64_t word = 0;
  fill(&word, sizeof word);
  return word;
}

std::string random_digits(size_t count) {
  std::string digits(count, '\0');
  fill(digits.data(), count);
  for (char& digit : digits) {
    digit = "0123456789abcdef"[static_cast<unsigned char>(digit) % 16];
  }
  return digits;
}

} // namespace blobstore::internal
