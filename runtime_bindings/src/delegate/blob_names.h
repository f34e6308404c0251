// Names for versions of blobs, under which an inner backend's own cache keeps packed weights.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace blobstore::internal {

/// A name of 16 characters that stands for one identity.
///
/// The contents of a file have a name that is a digest of 96 bits, and so the same in every process. Other contents
/// have a number that stands for one identity in the whole process, as long as the name is held. An identity that
/// returns after its name was released gets a new number, so no number ever stands for two identities.
///
/// Until its commit has happened, an identity is valid only for that commit. A commit that fails releases its names. A
/// fork ends them in the child, because the commit goes on in the parent only: the child inherits what was prepared,
/// but not the thread that would release it. The same identity may stand for other bytes there, so it gets a new
/// number.
class BlobName {
 public:
  /// @param identity everything that determines the bytes of a blob and of the blobs that are packed together with it.
  /// @param committed false for bytes of a commit that is being prepared.
  static std::shared_ptr<const BlobName> of(const std::string& identity, bool committed);
  /// @param identity of contents, everywhere: everything that determines how they are packed.
  static std::shared_ptr<const BlobName> of_content(const std::string& identity);
  /// Must be called when the commit has happened.
  void settle() const noexcept { committed_.store(true, std::memory_order_relaxed); }
  /// How many names are held.
  static size_t count();

  ~BlobName();
  BlobName(const BlobName&) = delete;
  BlobName& operator=(const BlobName&) = delete;

  /// Whether it is the name of contents.
  bool is_of_content() const { return number_ == 0; }
  /// 16 characters: hexadecimal digits, or those of a digest.
  const std::string& text() const { return text_; }

 private:
  BlobName(std::string identity, uint64_t number, std::string text)
      : identity_(std::move(identity)), number_(number), text_(std::move(text)) {}

  struct Registry;

  std::string identity_;
  uint64_t number_; // 0 for contents
  std::string text_;
  mutable std::atomic<bool> committed_{false};
};

} // namespace blobstore::internal
