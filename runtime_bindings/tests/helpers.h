// What several C++ tests do with errors, files and numbers.
#pragma once

#include <atomic>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>

#include <blobstore/cache.h>
#include <blobstore/error.h>

#include "check.h"

/// The kind of the error that a function throws.
template <typename Function>
std::optional<blobstore::ErrorKind> kind_of_error(const Function& function) {
  try {
    function();
  } catch (const blobstore::Error& error) {
    return error.kind();
  }
  return std::nullopt;
}

template <typename Function>
bool fails(blobstore::ErrorKind kind, const Function& function) {
  return kind_of_error(function) == kind;
}

/// The message of the error of a kind that a function must throw.
template <typename Function>
std::string error_of(blobstore::ErrorKind kind, const Function& function) {
  try {
    function();
  } catch (const blobstore::Error& error) {
    CHECK(error.kind() == kind);
    return error.what();
  }
  CHECK(!"an error");
  return "";
}

inline std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), {}};
}

/// In place, so that a file stays the same one.
inline void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// The first number of a blob of float32.
inline float first(const blobstore::BlobCache& cache, const char* key) {
  float number;
  std::memcpy(&number, cache.at(key).data, sizeof number);
  return number;
}

/// Calls a function in a thread of its own, again and again with the next number, until its scope ends.
class Repeating {
 public:
  template <typename Work>
  explicit Repeating(Work work)
      : thread_([this, work] {
          for (int n = 1; !stop_; ++n) {
            work(n);
          }
        }) {}
  ~Repeating() {
    stop_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};
