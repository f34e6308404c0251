// Hash maps of texts that come from files.
#pragma once

#include <cstddef>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace blobstore::internal {

/// A hash that differs from process to process. The standard library's hash is the same everywhere, so a small file
/// could have so many keys with one hash value that looking them up takes minutes.
struct TextHash {
  size_t operator()(std::string_view text) const;
};

template <typename Value>
using TextMap = std::unordered_map<std::string_view, Value, TextHash>;
using TextSet = std::unordered_set<std::string_view, TextHash>;

} // namespace blobstore::internal
