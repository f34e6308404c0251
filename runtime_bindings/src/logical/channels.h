// The channels of a tensor, each of which has its own scale.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <blobstore/error.h>

#include "logical/numbers.h"
#include "os/text.h"

namespace blobstore::internal {

/// A tensor as runs of `inner` numbers, each of which belongs to one of `count` channels.
struct Channels {
  uint64_t count = 1;
  uint64_t inner = 1;

  Channels(const std::vector<int64_t>& sizes, int64_t axis) {
    const auto rank = static_cast<int64_t>(sizes.size());
    axis += axis < 0 ? rank : 0;
    if (axis < 0 || axis >= rank) {
      throw_error(ErrorKind::Layout, "a tensor of shape {} has no axis {}", to_string(sizes), axis);
    }
    count = static_cast<uint64_t>(sizes[static_cast<size_t>(axis)]);
    for (size_t i = static_cast<size_t>(axis) + 1; i < sizes.size(); ++i) {
      inner *= static_cast<uint64_t>(sizes[i]);
    }
  }

  /// Call `one(at, n, channel)` for runs of one channel, or `each(at, n, channel)` for runs of n channels.
  template <typename One, typename Each>
  void visit(uint64_t begin, uint64_t end, One one, Each each) const {
    uint64_t channel = begin / inner % count;
    for (uint64_t at = begin; at < end; channel = 0) {
      if (inner > 1) {
        for (; channel < count && at < end; ++channel, at += inner) {
          one(at, inner, channel);
        }
      } else {
        const uint64_t n = std::min(count - channel, end - at);
        each(at, n, channel);
        at += n;
      }
    }
  }
};

} // namespace blobstore::internal
