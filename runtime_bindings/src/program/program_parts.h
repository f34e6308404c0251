// The parts of a .pte that matter for its weights: which tensors are constants, what its delegates have, and what comes
// from data files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/layout.h>

namespace blobstore::internal {

/// Bytes in the file of a program, which owns them.
struct Part {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

struct ProgramParts {
  struct Constant {
    std::string method;
    Layout layout;
  };
  struct External {
    std::string key;
    std::string method;
    std::optional<Layout> layout; // empty if this version does not know its type
    bool is_mutable = false;
  };
  struct Delegate {
    std::string method;
    std::string backend;
    Part payload;
  };

  std::string path;
  std::vector<std::string> methods;
  std::multimap<uint32_t, Constant> constants; // by number: those with the same one have the same bytes
  std::vector<External> externals;
  std::vector<Delegate> delegates;
  std::map<std::string, Part> named_data;
  std::shared_ptr<const void> owner; // of the bytes; empty if the caller owns them
};

/// Read the parts of a program. @throws Error InvalidFile.
ProgramParts read_program_parts(const std::string& path, const uint8_t* data, size_t size);

} // namespace blobstore::internal
