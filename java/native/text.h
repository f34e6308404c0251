// Java's strings are UTF-16, the library's are UTF-8.
#pragma once

#include <string>

namespace blobstore::java {

/// Each byte that is not part of a character becomes U+FFFD.
std::u16string to_utf16(const std::string& text);

/// @throws Error UnsupportedData: half of a surrogate pair.
std::string to_utf8(const std::u16string& text);

} // namespace blobstore::java
