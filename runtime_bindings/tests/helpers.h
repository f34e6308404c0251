// What several C++ tests include, and do with errors, files and numbers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <executorch/extension/tensor/tensor.h>

#include <blobstore/cache.h>
#include <blobstore/error.h>
#include <blobstore/reading.h>

#include "check.h"

constexpr blobstore::BlobCache::Mode kModes[] = {
    blobstore::BlobCache::Mode::Private, blobstore::BlobCache::Mode::Copy, blobstore::BlobCache::Mode::Shared};

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

inline bool has(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) {
    std::fprintf(stderr, "'%s' lacks '%s'\n", text.c_str(), part.c_str());
    return false;
  }
  return true;
}

/// Check that a call is refused with an error of this kind whose message has this text.
template <typename Call>
void refused(blobstore::ErrorKind kind, const char* text, const Call& call) {
  CHECK(has(error_of(kind, call), text));
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

/// The numbers of a blob of float32.
inline std::vector<float> floats(const blobstore::BlobCache& cache, const std::string& key) {
  const blobstore::Blob& blob = cache.at(key);
  std::vector<float> numbers(blob.size / sizeof(float));
  std::memcpy(numbers.data(), blob.data, blob.size);
  return numbers;
}

/// The first number of a blob of float32.
inline float first(const blobstore::BlobCache& cache, const char* key) {
  float number;
  std::memcpy(&number, cache.at(key).data, sizeof number);
  return number;
}

/// The numbers of a tensor of float32.
inline std::vector<float> numbers(const executorch::aten::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<float>();
  return {data, data + tensor.numel()};
}

/// One value for all numbers of some blobs of float32.
inline std::vector<blobstore::Change> filled(
    const blobstore::BlobCache& cache, const std::vector<std::string>& keys, float value) {
  std::vector<blobstore::Change> changes;
  for (const std::string& key : keys) {
    changes.emplace_back(key, std::vector<float>(cache.at(key).size / sizeof(float), value));
  }
  return changes;
}

/// Run some work in a child, which may take a minute. @returns whether it ended well; a child that hangs is killed.
template <typename Work>
bool in_child(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    std::_Exit(0);
  }
  int status = 0;
  for (int waited = 0; waited < 60'000; ++waited) {
    if (waitpid(child, &status, WNOHANG) == child) {
      return status == 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return false;
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
