// Fuzzes the file beside a working copy: its locks, counters and journal. BLOBSTORE_FUZZ_COPY names the file that the
// working copy is made of.
#include "../helpers.h"
#include "format/digest.h"
#include "input.h"
#include "mutate.h"

namespace {

using blobstore::BlobCache;

constexpr size_t kPage = 4096;

/// A working copy, and both files as they were before the first commit.
struct Copy {
  explicit Copy(const std::string& folder) : path(folder + "/copy.ptd"), beside(path + ".commits") {
    blobstore::make_working_copy({std::getenv("BLOBSTORE_FUZZ_COPY")}, path);
    BlobCache::open({path}, BlobCache::Mode::Shared);
    old = read(path);
    fresh = read(beside);
  }
  ~Copy() {
    std::remove(beside.c_str());
    std::remove(path.c_str());
    std::remove(path.substr(0, path.rfind('/')).c_str());
  }

  std::string path;
  std::string beside;
  std::string old;
  std::string fresh;
};

std::string new_folder() {
  const char* base = std::getenv("TMPDIR");
  std::string folder = std::string(base == nullptr ? "/tmp" : base) + "/commits-XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) {
    std::perror("mkdtemp");
    std::exit(2);
  }
  return folder;
}

/// The working copy of this process.
const Copy& copy() {
  static const Copy one(new_folder());
  return one;
}

/// Where the words are that name a working copy: they differ between those of two copies.
const std::vector<size_t>& naming() {
  static const std::vector<size_t> places = [] {
    const Copy other(new_folder());
    std::vector<size_t> found;
    for (size_t at = 0; at + 8 <= other.fresh.size(); at += 8) {
      if (other.fresh.compare(at, 8, copy().fresh, at, 8) != 0) {
        found.push_back(at);
      }
    }
    return found;
  }();
  return places;
}

/// Call a function with the sizes that a journal may have, as words of the first page say.
template <typename Use>
void for_sizes(const uint8_t* data, size_t size, const Use& use) {
  for (size_t at = 0; at + 8 <= size && at < kPage; at += 8) {
    uint64_t length;
    std::memcpy(&length, data + at, sizeof length);
    if (size > kPage + 16 && length > 0 && length <= size - kPage - 16) {
      use(length);
    }
  }
}

void reseal(uint8_t* data, size_t size) {
  for_sizes(data, size, [&](uint64_t length) {
    const blobstore::internal::Digest sum = blobstore::internal::digest(data + kPage, length);
    std::memcpy(data + kPage + length, sum.data(), sum.size());
  });
}

/// Whether a journal on a page has its digest.
bool is_sealed(const std::string& bytes) {
  bool sealed = false;
  const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
  for_sizes(data, bytes.size(), [&](uint64_t length) {
    for (size_t start = kPage; start + length + 16 <= bytes.size(); start += kPage) {
      const blobstore::internal::Digest sum = blobstore::internal::digest(data + start, length);
      sealed = sealed || std::memcmp(data + start + length, sum.data(), sum.size()) == 0;
    }
  });
  return sealed;
}

void must_be_old_unless_sealed(const std::string& beside) {
  must(read(copy().path) == copy().old || is_sealed(beside));
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  naming();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string beside(reinterpret_cast<const char*>(data), size);
  for (const size_t at : naming()) {
    if (at + 8 <= size) {
      beside.replace(at, 8, copy().fresh, at, 8);
    }
  }
  write(copy().path, copy().old);
  write(copy().beside, beside);
  try {
    const auto cache = BlobCache::open({copy().path}, BlobCache::Mode::Shared);
    std::vector<std::vector<uint8_t>> changed;
    std::vector<blobstore::Change> changes;
    changed.reserve(cache->size());
    for (size_t i = 0; i < cache->size(); ++i) {
      const blobstore::Blob& blob = cache->blob(i);
      changed.emplace_back(blob.data, blob.data + blob.size);
      for (uint8_t& byte : changed.back()) {
        byte ^= 1;
      }
      changes.push_back({blob.key, changed.back().data(), blob.size, &blob.layout});
    }
    must_be_old_unless_sealed(beside); // no journal without its digest was replayed
    cache->update(changes);
    for (size_t i = 0; i < changed.size(); ++i) {
      must(changed[i].empty() || std::memcmp(cache->blob(i).data, changed[i].data(), changed[i].size()) == 0);
    }
  } catch (const blobstore::Error&) {
    must_be_old_unless_sealed(beside); // nothing was changed before the error
  }
  must(read(copy().path).size() == copy().old.size()); // nothing was written behind the end
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned int seed) {
  return mutate_sealed(data, size, most, seed, &reseal);
}
