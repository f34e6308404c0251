// The encodings of blobs that change their bytes.
#pragma once

#include <string>
#include <vector>

/// Those that need no base first.
inline std::vector<std::string> encodings() {
  std::vector<std::string> names = {"planes:1", "planes:2", "planes:4", "planes:8"};
  for (const char* kind : {"u1", "u2", "u4", "u8", "f2", "f4", "f8"}) {
    for (const char* bits : {"0", "2", "4"}) {
      names.push_back(std::string("near:") + kind + ":" + bits);
    }
  }
  return names;
}
