// From which blobs of a working copy its packed weights are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace blobstore::internal {

/// From which keys each entry is packed: that of the weight, of the bias, and so on; empty for one that is missing.
using PackedKeys = std::map<std::string, std::vector<std::string>>;

/// @throws Error InvalidFile.
[[noreturn]] void throw_not_packed(const std::string& path, const std::string& reason);

/// The bytes of the entry `kPackedKeys`: whence the others come.
std::string encode_keys(const PackedKeys& keys);
/// @throws Error InvalidFile.
PackedKeys decode_keys(const std::string& path, const uint8_t* data, size_t size);
/// The size of the entry `kPackedState`, in bytes: a generation, eight bytes that are zero, and for each other entry
/// the digest of its bytes and those of the blobs that it is made of. An entry whose digest is zero is not up to date.
size_t state_size(const PackedKeys& keys);
/// Where the digests begin in that entry, and how many there are for one of the others.
inline constexpr size_t kStateHead = 16;
size_t digests_of(const std::vector<std::string>& sources);

} // namespace blobstore::internal
