#include "os/random.h"

#include <random>

namespace blobstore::internal {

uint32_t random_word() {
  return std::random_device()();
}

std::string random_digits(size_t count) {
  std::random_device random;
  std::string digits(count, '\0');
  for (char& digit : digits) {
    digit = "0123456789abcdef"[random() % 16];
  }
  return digits;
}

} // namespace blobstore::internal
