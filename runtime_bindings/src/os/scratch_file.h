// A file that other code opens by its path, and that is gone when it is no longer used.
#pragma once

#include <string>

#include "os/file.h"

namespace blobstore::internal {

/// An empty file of this process. On Linux it is memory without a name in any folder, so a full disk cannot end the
/// process while the file is written through a map. Elsewhere it is a temporary file.
class ScratchFile {
 public:
  /// @param folder where the file is if it cannot be memory; ends with a separator.
  /// @throws Error FileAccess.
  explicit ScratchFile(const std::string& folder);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  /// Valid in this process, as long as this object. A child of a fork must not use it.
  const std::string& path() const { return path_; }
  const File& file() const { return file_; }

 private:
  std::string path_;
  std::string name_; // in a folder; empty for memory
  File file_;
};

} // namespace blobstore::internal
