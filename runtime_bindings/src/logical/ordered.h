// A map that remembers what came first.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace blobstore::internal {

/// Values by text, in the order in which the texts were first seen.
template <typename Value>
class Ordered {
 public:
  Value& operator[](const std::string& key) {
    const auto [at, is_new] = places_.emplace(key, items_.size());
    if (is_new) {
      items_.emplace_back(key, Value());
    }
    return items_[at->second].second;
  }
  bool contains(const std::string& key) const { return places_.count(key) != 0; }
  bool empty() const { return items_.empty(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

 private:
  std::map<std::string, size_t> places_;
  std::vector<std::pair<std::string, Value>> items_;
};

} // namespace blobstore::internal
