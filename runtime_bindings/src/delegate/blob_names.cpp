#include "delegate/blob_names.h"

#include <cinttypes>
#include <cstdio>
#include <iterator>
#include <mutex>
#include <unordered_map>

#include "format/text_hash.h"
#include "os/fork.h"

namespace blobstore::internal {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<std::string, std::weak_ptr<const BlobName>, TextHash> names;
  uint64_t next = 1;
};

Registry& registry() {
  static auto* all = new Registry; // delegates may be destroyed while the process ends, in any order
  return *all;
}

} // namespace

std::shared_ptr<const BlobName> BlobName::of(const std::string& identity, bool committed) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  auto& known = all.names[identity];
  std::shared_ptr<const BlobName> name = known.lock();
  if (name == nullptr) {
    name.reset(new BlobName(identity, all.next++));
    known = name;
  }
  if (committed) {
    name->settle();
  }
  return name;
}

BlobName::~BlobName() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.names.find(identity_);
  if (found != all.names.end() &&
      found->second.expired()) { // otherwise another thread asked for the identity meanwhile
    all.names.erase(found);
  }
}

size_t BlobName::count() {
  Registry& all = registry();
  const std::lock_guard<std::mutex> guard(all.mutex);
  return all.names.size();
}

void BlobName::before_fork() {
  registry().mutex.lock();
}

void BlobName::after_fork_in_parent() {
  registry().mutex.unlock();
}

void BlobName::after_fork_in_child() {
  Registry& all = registry();
  renew(all.mutex);
  for (auto entry = all.names.begin(); entry != all.names.end();) {
    const std::shared_ptr<const BlobName> name = entry->second.lock();
    entry =
        name != nullptr && name->committed_.load(std::memory_order_relaxed) ? std::next(entry) : all.names.erase(entry);
  }
}

std::string BlobName::text() const {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016" PRIx64, number_);
  return digits;
}

} // namespace blobstore::internal
