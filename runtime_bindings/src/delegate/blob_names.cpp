#include "delegate/blob_names.h"

#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <mutex>
#include <unordered_map>

#include "format/digest.h"
#include "format/text_hash.h"
#include "os/fork.h"

namespace blobstore::internal {
namespace {

std::string numbered(uint64_t number) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016" PRIx64, number);
  return digits;
}

/// 96 bits of a digest, 6 in each character.
std::string named_by(const Digest& digest) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  std::string text;
  for (size_t i = 0; i < 12; i += 3) {
    const uint32_t bits = uint32_t{digest[i]} << 16 | uint32_t{digest[i + 1]} << 8 | digest[i + 2];
    for (int shift = 18; shift >= 0; shift -= 6) {
      text += kDigits[bits >> shift & 63];
    }
  }
  return text;
}

} // namespace

/// All numbers of this process.
struct BlobName::Registry final : ForkAware {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<const BlobName>, TextHash> names;
  uint64_t next = 1;

  static Registry& get() {
    static auto* all = new Registry; // delegates may be destroyed while the process ends, in any order
    return *all;
  }

  Registry() { enter(); }

  void before_fork() override { mutex.lock(); }
  void after_fork_in_parent() override { mutex.unlock(); }
  void after_fork_in_child() override {
    renew(mutex);
    for (auto entry = names.begin(); entry != names.end();) {
      const std::shared_ptr<const BlobName> name = entry->second.lock();
      entry =
          name != nullptr && name->committed_.load(std::memory_order_relaxed) ? std::next(entry) : names.erase(entry);
    }
  }
};

std::shared_ptr<const BlobName> BlobName::of(const std::string& identity, bool committed) {
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> guard(all.mutex);
  auto& known = all.names[identity];
  std::shared_ptr<const BlobName> name = known.lock();
  if (name == nullptr) {
    const uint64_t number = all.next++;
    name.reset(new BlobName(identity, number, numbered(number)));
    known = name;
  }
  if (committed) {
    name->settle();
  }
  return name;
}

std::shared_ptr<const BlobName> BlobName::of_content(const std::string& identity) {
  std::string text = named_by(digest(identity.data(), identity.size()));
  return std::shared_ptr<const BlobName>(new BlobName({}, 0, std::move(text)));
}

BlobName::~BlobName() {
  if (is_of_content()) {
    return;
  }
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.names.find(identity_);
  if (found != all.names.end() &&
      found->second.expired()) { // otherwise another thread asked for the identity meanwhile
    all.names.erase(found);
  }
}

size_t BlobName::count() {
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> guard(all.mutex);
  return all.names.size();
}

} // namespace blobstore::internal
