// Names for versions of blobs, as an inner backend's own cache of packed weights knows them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace blobstore {

/// A number that stands for one identity while anybody holds it, in the whole process. An identity that comes back after
/// all let go of it gets a new number, so no number ever stands for two identities.
///
/// Until its commit has happened, an identity holds only as long as that commit: it ends with a commit that fails, which
/// releases its names, and with a fork, as the commit goes on in the parent only. The child inherits what was prepared,
/// but not the thread that would have released it; the same identity may stand for other bytes there, so it gets a new
/// number.
class BlobName {
 public:
  /// @param identity all that decides the bytes of a blob and of what is packed together with it.
  /// @param committed whether these are bytes that hold now, and not those of a commit that is being prepared.
  static std::shared_ptr<const BlobName> of(const std::string& identity, bool committed);
  /// The commit has happened.
  void settle() const noexcept { committed_.store(true, std::memory_order_relaxed); }
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
  mutable std::atomic<bool> committed_{false};
};

} // namespace blobstore
