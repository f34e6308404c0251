// Names for versions of blobs, as an inner backend's own cache of packed weights knows them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace blobstore {

/// A number that stands for one identity while anybody holds it, in the whole process. An identity that comes back after
/// all let go of it gets a new number, so no number ever stands for two identities.
class BlobName {
 public:
  /// @param identity all that decides the bytes of a blob and of what is packed together with it.
  static std::shared_ptr<const BlobName> of(const std::string& identity);
  /// How many are held.
  static size_t count();

  /// Nobody else holds the lock of the names when the process forks.
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

  ~BlobName();
  BlobName(const BlobName&) = delete;
  BlobName& operator=(const BlobName&) = delete;

  /// 16 hexadecimal digits.
  std::string text() const;

 private:
  BlobName(std::string identity, uint64_t number) : identity_(std::move(identity)), number_(number) {}

  std::string identity_;
  uint64_t number_;
};

} // namespace blobstore
