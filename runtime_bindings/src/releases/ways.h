// In which forms the contents of a release can be fetched, and the cheapest of them. Nobody needs to trust the list:
// what it leads to is compared with digests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "codec/decoder.h"
#include "releases/parts.h"

namespace blobstore::internal {

/// One form in which a content can be fetched.
struct ReleaseWay {
  Encoding encoding;
  uint32_t object = 0; // which of the objects holds it
  uint64_t at = 0; // first byte there
  uint64_t stored = 0; // number of bytes
  std::optional<size_t> base; // the content that it is a difference to
};

struct ReleaseWays {
  std::vector<ReleaseObject> objects;
  std::vector<ReleaseObject> contents; // those of the release, and then those to which they are differences
  std::vector<std::vector<ReleaseWay>> ways; // of each content, those that can be decoded here
};

/// @param index the SHA-256 of the index that the ways belong to.
/// @param where the file that the bytes are from, for messages.
/// @throws Error InvalidFile: it is malformed, or has the ways of another release.
ReleaseWays read_ways(
    const std::string& bytes, const std::string& index, const ReleaseParts& parts, const std::string& where);

/// How to get a content.
struct Route {
  uint64_t cost = 0; // bytes to fetch for it, with those of the contents that it is made of
  const ReleaseWay* way = nullptr; // the last step; nullptr if it is here
};

/// The cheapest route to each content, through others if that is cheaper; empty where there is none.
/// @param here whether each content is here.
std::vector<std::optional<Route>> cheapest(
    const std::vector<std::vector<ReleaseWay>>& ways, const std::vector<bool>& here);

} // namespace blobstore::internal
