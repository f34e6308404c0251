#include "adapters/foundation.h"

#include <algorithm>

namespace blobstore::internal {
namespace {

constexpr char kMagic[] = "BSFOUND0";
constexpr char kOpaque = '\xff';

void append(std::string& text, uint64_t number, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) {
    text += static_cast<char>(number >> (8 * i) & 0xff);
  }
}

} // namespace

std::string fingerprint(std::vector<FoundationBlob> blobs) {
  std::sort(blobs.begin(), blobs.end(), [](const auto& a, const auto& b) { return a.key < b.key; });
  std::string text = kMagic;
  for (const FoundationBlob& blob : blobs) {
    append(text, blob.key.size(), 4);
    text += blob.key;
    if (*blob.layout) {
      const Layout& layout = **blob.layout;
      append(text, static_cast<uint8_t>(layout.scalar_type), 1);
      append(text, layout.sizes.size(), 1);
      for (const int32_t size : layout.sizes) {
        append(text, static_cast<uint64_t>(size), 8);
      }
      text.append(layout.dim_order.begin(), layout.dim_order.end());
    } else {
      text += kOpaque;
    }
    append(text, blob.size, 8);
    text.append(blob.digest.begin(), blob.digest.end());
  }
  return to_string(digest(text.data(), text.size()));
}

} // namespace blobstore::internal
