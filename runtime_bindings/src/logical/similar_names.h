// Names in messages: lists of them, and near ones for a name that is not known.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace blobstore::internal {

using Names = std::vector<std::string_view>;

constexpr size_t kAll = SIZE_MAX;

/// Names in quotes, with commas; after `most` of them only the number of the others.
std::string quoted(const Names& names, size_t most = kAll);
/// At most five names, quoted; two of them with `last` in between.
std::string some(const Names& names, const char* last = "and");

/// At most three of the names that are known, the most similar first.
Names near(std::string_view name, const Names& known);
/// The end of a message about an unknown key: near ones; that the keys are contents; or nothing.
std::string suggest(std::string_view name, const Names& known);

/// Whether a key is made of contents, and no name.
bool is_content_key(std::string_view key);
/// Whether a key is 64 digits of a hash, as ExecuTorch's own lowering makes them, perhaps behind "scale_".
bool is_hash_key(std::string_view key);

} // namespace blobstore::internal
