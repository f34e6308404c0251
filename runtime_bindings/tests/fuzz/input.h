// What the fuzzers do with their bytes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include <executorch/runtime/platform/runtime.h>

#include <blobstore/error.h>

inline const bool kHasLogs = (executorch::runtime::runtime_init(), true);

/// A finding, unless this holds.
inline void must(bool holds) {
  if (!holds) {
    std::abort();
  }
}

/// Do something that may refuse the bytes by one kind of exception.
template <typename Refusal = blobstore::Error, typename Use>
void attempt(const Use& use) {
  try {
    use();
  } catch (const Refusal&) {
  }
}

/// A file in memory.
class InputFile {
 public:
  InputFile(const uint8_t* data, size_t size) : descriptor_(memfd_create("fuzz", MFD_CLOEXEC)) {
    if (descriptor_ < 0 || write(descriptor_, data, size) != static_cast<ssize_t>(size)) {
      std::perror("memfd");
      std::exit(2);
    }
    path_ = "/proc/self/fd/" + std::to_string(descriptor_);
  }
  ~InputFile() { close(descriptor_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  int descriptor_;
  std::string path_;
};
