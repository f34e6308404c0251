// Each line on standard input is bytes in hexadecimal digits. Prints the numbers of their UTF-16, and whether this
// comes back as the same bytes.
#include <cstdio>
#include <iostream>
#include <string>

#include <blobstore/error.h>

#include "text.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::string bytes;
    for (size_t i = 0; i + 1 < line.size(); i += 2) {
      bytes += static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16));
    }
    const std::u16string wide = blobstore::java::to_utf16(bytes);
    for (const char16_t unit : wide) {
      std::printf("%04x", static_cast<unsigned>(unit));
    }
    std::printf(" %s\n", blobstore::java::to_utf8(wide) == bytes ? "same" : "other");
  }
  try {
    (void)blobstore::java::to_utf8(u"a\xD834");
  } catch (const blobstore::Error& error) {
    std::printf("%s\n", error.what());
  }
  return 0;
}
