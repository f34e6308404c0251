// Files that a device writes and reads, and how their bytes get to memory.
//
//   files_test FILE.ptd
//
// FILE.ptd has float tensors "a" and "b" of one size, "tied" with the bytes of "a", and opaque bytes "opaque".
// tests/runtime/test_save.py has what else is true of files that are written.

#include <cerrno>
#include <filesystem>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <executorch/runtime/platform/runtime.h>

#include <blobstore/tensors.h>

#include "helpers.h"
#include "os/file_pages.h"
#include "os/output_file.h"
#include "os/read_ahead.h"
#include "os/streaming.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

/// A new folder in the one that this runs in. Its file model.ptd has "a" and "tied", which are equal, "b", which is
/// not, and "opaque", which is no tensor.
std::string new_folder(const std::string& model, const std::string& name) {
  std::filesystem::remove_all(name);
  std::filesystem::create_directory(name);
  std::filesystem::copy_file(model, name + "/model.ptd");
  return name;
}

void test_state_dict(const std::string& model) {
  const std::string path = new_folder(model, "state") + "/model.ptd";
  auto tensors = load_state_dict(path);
  std::filesystem::remove(path);
  CHECK(tensors.size() == 3 && tensors.count("opaque") == 0);
  const auto b = tensors.at("b");
  tensors.clear(); // each tensor keeps the file mapped
  CHECK(numbers(*b) == std::vector<float>(60'000, 1));
  b->mutable_data_ptr<float>()[0] = 3; // a private copy of a page
  CHECK(b->const_data_ptr<float>()[0] == 3);
}

void test_one_generation(const std::string& model) {
  const auto cache = BlobCache::open({model});
  const auto set = [&](int n) { cache->update(filled(*cache, {"a", "b", "tied"}, static_cast<float>(n))); };
  set(0);
  const Repeating commits(set);
  for (int i = 0; i < 20; ++i) {
    cache->save("saved.ptd");
    const auto saved = BlobCache::open({"saved.ptd"});
    CHECK(saved->verify());
    CHECK(first(*saved, "a") == first(*saved, "b") && first(*saved, "a") == first(*saved, "tied"));
  }
}

void test_folder_without_permission(const std::string& model) {
  const std::string folder = new_folder(model, "locked");
  const auto cache = BlobCache::open({folder + "/model.ptd"});
  CHECK(chmod(folder.c_str(), 0555) == 0);
  const uid_t root = geteuid();
  CHECK(root != 0 || seteuid(65534) == 0); // root may write anywhere
  refused(ErrorKind::FileAccess, std::strerror(EACCES), [&] { cache->save(folder + "/saved.ptd"); });
  CHECK(seteuid(root) == 0 && chmod(folder.c_str(), 0755) == 0);
  const std::filesystem::directory_iterator files(folder);
  CHECK(std::distance(begin(files), end(files)) == 1);
}

#if defined(__linux__) && !defined(BLOBSTORE_EMULATED)
/// How many pages of a file are in memory from each of some offsets on, without a hole.
std::vector<size_t> in_memory(const std::string& path, const std::vector<size_t>& offsets) {
  const internal::File file(path, /*writable=*/false);
  const internal::Mapping map(file, 0, file.size(), internal::Mapping::Kind::ReadOnly);
  // pages of the system's size, also where tests feign another one
  constexpr unsigned char kUnwritten = 0xee;
  std::vector<unsigned char> pages(map.length() / 4096, kUnwritten);
  CHECK(mincore(map.pages(), map.length(), pages.data()) == 0);
  pages.erase(std::find(pages.begin(), pages.end(), kUnwritten), pages.end());
  const size_t page = map.length() / pages.size();
  std::vector<size_t> found;
  for (const size_t offset : offsets) {
    size_t end = offset / page;
    while (end < pages.size() && (pages[end] & 1) != 0) {
      ++end;
    }
    found.push_back(end * page - offset);
  }
  return found;
}
#endif

/// What is asked for is read, and nothing else: not what is in memory already, and not more than permitted.
void test_read_ahead() {
#if defined(__linux__) && !defined(BLOBSTORE_EMULATED)
  const std::string path = "large";
  constexpr size_t kMib = size_t{1} << 20;
  {
    internal::OutputFile out(path);
    const std::vector<uint8_t> bytes(64 * kMib, 7);
    out.write(bytes.data(), bytes.size());
    out.commit();
  }
  const internal::File file(path, /*writable=*/false);
  const auto drop = [&] { CHECK(posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED) == 0); };
  drop();
  if (in_memory(path, {0})[0] != 0) {
    return; // a file system in memory
  }
  using Sizes = std::vector<size_t>;
  const auto becomes = [&](const Sizes& offsets, const Sizes& sizes) {
    const auto last = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (in_memory(path, offsets) != sizes && std::chrono::steady_clock::now() < last) {
      std::this_thread::yield();
    }
    return in_memory(path, offsets) == sizes;
  };
  internal::read_ahead(file, {{0, 64 * kMib}}, 0);
  internal::read_ahead(file, {}, 64 * kMib);
  CHECK(becomes({0, 32 * kMib}, {0, 0}));
  internal::read_ahead(file, {{8 * kMib, kMib}, {32 * kMib, 8 * kMib}}, 6 * kMib);
  CHECK(becomes({0, 8 * kMib, 32 * kMib, 48 * kMib}, {0, kMib, 5 * kMib, 0}));
  // what is there is not asked for, but counts
  internal::read_ahead(file, {{8 * kMib, kMib}, {48 * kMib, 8 * kMib}}, 6 * kMib);
  CHECK(becomes({0, 8 * kMib, 48 * kMib}, {0, kMib, 5 * kMib}));
  drop();
  internal::read_ahead(file, {{0, 64 * kMib}}, UINT64_MAX);
  CHECK(becomes({0}, {64 * kMib}));
  std::filesystem::remove(path);
#endif
}

/// Large runs are streamed, wherever they lie; nothing around them changes.
void test_copies() {
  constexpr size_t kMargin = 64;
  const size_t large = internal::kWorthStreaming;
  std::vector<uint8_t> from(large + 2 * kMargin);
  for (size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<uint8_t>(i * 2'654'435'761 >> 24 | 1);
  }
  for (const size_t size : {size_t{0}, size_t{100}, large - 1, large, large + 1, large + 47}) {
    for (const size_t to : {0, 1, 15, 16, 17}) {
      const size_t source = 7 * to % kMargin;
      std::vector<uint8_t> copied(from.size() + kMargin);
      internal::stream_copy(copied.data() + to, from.data() + source, size);
      std::vector<uint8_t> expected(copied.size());
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(source), size, expected.begin() + to);
      CHECK(copied == expected);
    }
  }
}

/// Fresh pages are moved to their place; memory that others map where these were stays.
void test_moved_pages() {
#if BLOBSTORE_LINUX
  using internal::File;
  using internal::FilePages;
  using internal::Mapping;
  const std::string path = "pages";
  const size_t size = size_t{5} << 20;
  const std::vector<uint8_t> old(2 * size, 1);
  const std::vector<uint8_t> fresh(size, 2);
  internal::OutputFile output(path);
  output.write(old.data(), old.size());
  output.commit();
  const File file(path, /*writable=*/false);
  const Mapping map(file, 0, old.size(), Mapping::Kind::Private);
  FilePages pages(map.data() + 100, size, file, 100);
  std::vector<void*> others;
  {
    FilePages::Prepared prepared = pages.prepare(fresh.data(), "a");
    pages.write(std::move(prepared), fresh.data(), /*streamed=*/false);
    for (int i = 0; i < 64; ++i) { // the first gap that is large enough gets them
      others.push_back(mmap(nullptr, size_t{1} << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    }
  }
  for (void* other : others) {
    CHECK(other != MAP_FAILED && msync(other, size_t{1} << 20, MS_ASYNC) == 0); // an error if a part is not mapped
    munmap(other, size_t{1} << 20);
  }
  CHECK(std::equal(fresh.begin(), fresh.end(), map.data() + 100));
  for (const bool streamed : {false, true}) { // in place
    const std::vector<uint8_t> next(size, streamed ? 3 : 4);
    pages.write(pages.prepare(next.data(), "a"), next.data(), streamed);
    CHECK(std::equal(next.begin(), next.end(), map.data() + 100));
  }
  CHECK(std::all_of(map.data(), map.data() + 100, [](uint8_t byte) { return byte == 1; }));
  CHECK(std::all_of(map.data() + 100 + size, map.data() + old.size(), [](uint8_t byte) { return byte == 1; }));
  pages.restore(pages.read_edges());
  CHECK(std::equal(old.begin(), old.end(), map.data()));
#endif
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  executorch::runtime::runtime_init();
  test_state_dict(argv[1]);
  test_one_generation(argv[1]);
  test_folder_without_permission(argv[1]);
  test_read_ahead();
  test_copies();
  test_moved_pages();
}
