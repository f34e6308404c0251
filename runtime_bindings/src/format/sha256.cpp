#include "format/sha256.h"

#include <algorithm>
#include <cstring>

#include "format/digest.h"

namespace blobstore::internal {
namespace {

constexpr std::array<uint32_t, 64> kConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr uint32_t rotated(uint32_t value, int by) {
  return value >> by | value << (32 - by);
}

} // namespace

void Sha256::block(const uint8_t* data) {
  uint32_t words[64];
  for (size_t i = 0; i < 16; ++i) {
    words[i] = uint32_t{data[4 * i]} << 24 | uint32_t{data[4 * i + 1]} << 16 | uint32_t{data[4 * i + 2]} << 8 |
        data[4 * i + 3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t far = words[i - 15];
    const uint32_t near = words[i - 2];
    words[i] = words[i - 16] + (rotated(far, 7) ^ rotated(far, 18) ^ far >> 3) + words[i - 7] +
        (rotated(near, 17) ^ rotated(near, 19) ^ near >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; ++i) {
    const uint32_t one = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + (g ^ (e & (f ^ g))) +
        kConstants[static_cast<size_t>(i)] + words[i];
    const uint32_t two = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) | (c & (a | b)));
    h = g;
    g = f;
    f = e;
    e = d + one;
    d = c;
    c = b;
    b = a;
    a = one + two;
  }
  const uint32_t sums[] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state_.size(); ++i) {
    state_[i] += sums[i];
  }
}

void Sha256::update(const void* data, size_t size) {
  const auto* at = static_cast<const uint8_t*>(data);
  size_t kept = size_ % kept_.size();
  size_ += size;
  if (kept != 0) {
    const size_t taken = std::min(size, kept_.size() - kept);
    std::memcpy(kept_.data() + kept, at, taken);
    at += taken;
    size -= taken;
    if (kept + taken < kept_.size()) {
      return;
    }
    block(kept_.data());
  }
  for (; size >= kept_.size(); at += kept_.size(), size -= kept_.size()) {
    block(at);
  }
  if (size > 0) {
    std::memcpy(kept_.data(), at, size);
  }
}

std::string Sha256::finish() {
  const uint64_t bits = size_ * 8;
  uint8_t end[72] = {0x80};
  const size_t zeros = (119 - size_ % 64) % 64; // so that the length ends a block
  for (size_t i = 0; i < 8; ++i) {
    end[1 + zeros + i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  }
  update(end, 1 + zeros + 8);
  std::array<uint8_t, 32> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return hexadecimal(bytes.data(), bytes.size());
}

std::string sha256(const void* data, size_t size) {
  Sha256 hash;
  hash.update(data, size);
  return hash.finish();
}

} // namespace blobstore::internal
