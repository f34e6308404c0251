// Files that a device writes and reads: saving, deltas, working copies, state dicts; full disks and folders without
// permission. Takes no arguments, makes its own files, and ends with 1 if something is wrong.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <executorch/runtime/platform/runtime.h>

#include <blobstore/cache.h>
#include <blobstore/reading.h>
#include <blobstore/tensors.h>

#include "format/ptd_writer.h"
#include "helpers.h"
#include "os/file_pages.h"
#include "os/output_file.h"
#include "os/read_ahead.h"
#include "os/streaming.h"

namespace {

using blobstore::BlobCache;
using blobstore::ErrorKind;
using blobstore::Layout;
using Mode = BlobCache::Mode;

/// The kind of the error that a function throws.
std::optional<ErrorKind> error_of(const std::function<void()>& function, int* number = nullptr) {
  try {
    function();
  } catch (const blobstore::Error& error) {
    if (number != nullptr) {
      *number = error.number();
    }
    return error.kind();
  }
  return std::nullopt;
}

/// A folder that is removed at the end.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/files_test-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~Folder() {
    for (const std::string& name : names()) {
      unlink((path_ + "/" + name).c_str());
    }
    rmdir(path_.c_str());
  }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    DIR* entries = opendir(path_.c_str());
    while (const dirent* entry = readdir(entries)) {
      if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) {
        found.emplace_back(entry->d_name);
      }
    }
    closedir(entries);
    return found;
  }
  size_t left() const { // hidden files
    size_t count = 0;
    for (const std::string& name : names()) {
      count += name[0] == '.' ? 1 : 0;
    }
    return count;
  }

 private:
  std::string path_;
};

constexpr size_t kCount = 50'000;

/// "a" and "tied" are equal, "b" is not, "opaque" is no tensor.
void write_model(const std::string& path) {
  const std::vector<float> a(kCount, 1);
  const std::vector<float> b(kCount, 2);
  const std::optional<Layout> layout = Layout{6, {static_cast<int32_t>(kCount)}, {0}};
  const std::optional<Layout> none;
  blobstore::internal::PtdWriter writer(true, [] {});
  const auto add = [&](const char* key, const std::vector<float>& values) {
    writer.add(key, layout, 16, reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float));
  };
  add("a", a);
  add("b", b);
  add("tied", a);
  writer.add("opaque", none, 1, reinterpret_cast<const uint8_t*>("some bytes"), 10);
  blobstore::internal::OutputFile file(path);
  writer.write(file);
  file.commit();
}

void set(BlobCache& cache, const std::vector<std::string>& keys, float value) {
  const std::vector<float> values(kCount, value);
  std::vector<blobstore::Change> changes;
  for (const std::string& key : keys) {
    changes.push_back({key, values.data(), values.size() * sizeof(float), nullptr});
  }
  cache.update(changes);
}

/// No two keys have one address, because backends take addresses for names; an empty blob has one, too.
void test_empty_blobs() {
  const Folder folder;
  const std::optional<Layout> empty = Layout{6, {0, 4}, {0, 1}};
  const std::optional<Layout> some = Layout{6, {8}, {0}};
  const std::vector<float> values(8, 1);
  const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
  blobstore::internal::PtdWriter writer(false, [] {});
  writer.add("a", empty, 16, bytes, 0);
  writer.add("b", some, 16, bytes, 32);
  writer.add("c", empty, 16, bytes, 0);
  blobstore::internal::OutputFile file(folder / "empty.ptd");
  writer.write(file);
  file.commit();
  blobstore::make_working_copy({folder / "empty.ptd"}, folder / "copy.ptd");
  for (const auto mode : {BlobCache::Mode::Private, BlobCache::Mode::Copy, BlobCache::Mode::Shared}) {
    const auto cache = BlobCache::open({folder / "copy.ptd"}, mode);
    CHECK(cache->at("a").data != cache->at("b").data && cache->at("a").data != cache->at("c").data);
    CHECK(cache->at("b").data != cache->at("c").data && cache->at("a").data != nullptr);
    const std::vector<float> other(8, 2);
    cache->update({{"a", other.data(), 0, nullptr}, {"b", other.data(), 32, nullptr}});
    CHECK(first(*cache, "b") == 2 && cache->version("a") == 1);
    cache->save(folder / "saved.ptd");
    CHECK(first(*BlobCache::open({folder / "saved.ptd"}), "b") == 2);
    if (mode != BlobCache::Mode::Shared) {
      cache->revert();
      CHECK(first(*cache, "b") == 1);
    }
  }
}

uint64_t size_of(const std::string& path) {
  struct stat status;
  CHECK(stat(path.c_str(), &status) == 0);
  return static_cast<uint64_t>(status.st_size);
}

void test_save_and_deltas() {
  const Folder folder;
  write_model(folder / "model.ptd");
  const auto cache = BlobCache::open({folder / "model.ptd"});
  CHECK(cache->verify());
  CHECK(cache->save(folder / "same.ptd") == size_of(folder / "model.ptd"));
  CHECK(cache->save(folder / "none.ptd", true) == size_of(folder / "none.ptd"));
  CHECK(BlobCache::open({folder / "none.ptd"})->size() == 0);
  set(*cache, {"b"}, 5);
  CHECK(cache->save(folder / "delta.ptd", true) < size_of(folder / "model.ptd") / 2 + 4096);
  cache->save(folder / "whole.ptd");

  const auto fresh = BlobCache::open({folder / "model.ptd"});
  fresh->load(folder / "delta.ptd");
  CHECK(first(*fresh, "a") == 1 && first(*fresh, "b") == 5);
  const auto whole = BlobCache::open({folder / "whole.ptd"});
  CHECK(whole->verify() && whole->size() == 4 && first(*whole, "b") == 5);
  CHECK(std::memcmp(whole->at("opaque").data, "some bytes", 10) == 0);
  CHECK(size_of(folder / "whole.ptd") == size_of(folder / "model.ptd")); // "tied" shares its bytes there too

  CHECK(error_of([&] { cache->save(folder / "model.ptd"); }) == ErrorKind::OutputPath);
  CHECK(symlink("model.ptd", (folder / "link.ptd").c_str()) == 0);
  CHECK(error_of([&] { cache->save(folder / "link.ptd"); }) == ErrorKind::OutputPath);
  cache->close();
  CHECK(error_of([&] { cache->save(folder / "closed.ptd"); }) == ErrorKind::Closed);
  CHECK(folder.left() == 0);
}

void test_working_copy() {
  const Folder folder;
  write_model(folder / "model.ptd");
  blobstore::make_working_copy({folder / "model.ptd"}, folder / "live.ptd");
  const auto one = BlobCache::open({folder / "live.ptd"}, Mode::Shared);
  const auto other = BlobCache::open({folder / "live.ptd"}, Mode::Shared);
  set(*one, {"a"}, 7); // not "tied", which shares its bytes in the file it was made from
  {
    const BlobCache::Reading reading(*other);
    CHECK(first(*other, "a") == 7 && first(*other, "tied") == 1);
  }
  CHECK(other->verify());
  other->save(folder / "delta.ptd", true);
  const auto fresh = BlobCache::open({folder / "delta.ptd"});
  CHECK(fresh->size() == 1 && first(*fresh, "a") == 7);
  CHECK(error_of([&] {
          blobstore::make_working_copy({folder / "model.ptd"}, folder / "model.ptd");
        }) == ErrorKind::OutputPath);
  CHECK(
      error_of([&] { blobstore::make_working_copy({folder / "missing"}, folder / "x.ptd"); }) == ErrorKind::FileAccess);
}

void test_state_dict() {
  const Folder folder;
  write_model(folder / "model.ptd");
  auto tensors = blobstore::load_state_dict(folder / "model.ptd");
  unlink((folder / "model.ptd").c_str());
  CHECK(tensors.size() == 3 && tensors.count("opaque") == 0);
  const auto b = tensors.at("b");
  tensors.clear(); // each tensor keeps the file mapped
  CHECK(b->numel() == static_cast<ssize_t>(kCount) && b->const_data_ptr<float>()[kCount - 1] == 2);
  b->mutable_data_ptr<float>()[0] = 3; // a private copy of a page
  CHECK(b->const_data_ptr<float>()[0] == 3);
}

void test_one_generation() {
  const Folder folder;
  write_model(folder / "model.ptd");
  const auto cache = BlobCache::open({folder / "model.ptd"});
  set(*cache, {"a", "b", "tied"}, 0);
  std::atomic<bool> stop{false};
  std::thread committer([&] {
    for (float value = 1; !stop; ++value) {
      set(*cache, {"a", "b", "tied"}, value);
    }
  });
  for (int i = 0; i < 20; ++i) {
    cache->save(folder / "saved.ptd");
    const auto saved = BlobCache::open({folder / "saved.ptd"});
    CHECK(saved->verify());
    CHECK(first(*saved, "a") == first(*saved, "b") && first(*saved, "a") == first(*saved, "tied"));
  }
  stop = true;
  committer.join();
}

void test_full_disk() {
  const Folder folder;
  write_model(folder / "model.ptd");
  const auto cache = BlobCache::open({folder / "model.ptd"});
  cache->save(folder / "saved.ptd", true);
  const uint64_t before = size_of(folder / "saved.ptd");
  struct rlimit old;
  CHECK(getrlimit(RLIMIT_FSIZE, &old) == 0);
  for (const rlim_t limit : {rlim_t{0}, rlim_t{100}, rlim_t{100'000}}) {
    const struct rlimit small{limit, old.rlim_max};
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    int number = 0;
    const auto save = error_of([&] { cache->save(folder / "saved.ptd"); }, &number);
    const auto copy = error_of([&] { blobstore::make_working_copy({folder / "model.ptd"}, folder / "live.ptd"); });
    CHECK(setrlimit(RLIMIT_FSIZE, &old) == 0);
    CHECK(save == ErrorKind::FileAccess && number == EFBIG && copy == ErrorKind::FileAccess);
    CHECK(size_of(folder / "saved.ptd") == before && folder.left() == 0 && folder.names().size() == 2);
  }
}

void test_folder_without_permission() {
  const Folder folder;
  write_model(folder / "model.ptd");
  const auto cache = BlobCache::open({folder / "model.ptd"});
  CHECK(chmod(folder.path().c_str(), 0555) == 0);
  const uid_t root = geteuid();
  CHECK(root != 0 || seteuid(65534) == 0); // root may write anywhere
  int number = 0;
  const auto found = error_of([&] { cache->save(folder / "saved.ptd"); }, &number);
  CHECK(seteuid(root) == 0 && chmod(folder.path().c_str(), 0755) == 0);
  CHECK(found == ErrorKind::FileAccess && number == EACCES);
  CHECK(error_of([&] { cache->save(folder / "missing" + "/x.ptd"); }, &number) == ErrorKind::FileAccess);
  CHECK(number == ENOENT && folder.names().size() == 1);
}

void test_killed_process() {
  const Folder folder;
  write_model(folder / "model.ptd");
  const pid_t child = fork();
  if (child == 0) {
    blobstore::internal::OutputFile file(folder / "saved.ptd");
    file.write("half", 4);
    _exit(0); // without destructors
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(folder.left() == 1);
  blobstore::internal::OutputFile other(folder / "other.ptd"); // a file that is being written
  BlobCache::open({folder / "model.ptd"})->save(folder / "saved.ptd");
  CHECK(folder.left() == 1);
  other.commit();
  CHECK(folder.left() == 0 && size_of(folder / "other.ptd") == 0);
}

#if defined(__linux__) && !defined(BLOBSTORE_EMULATED)
/// How many pages of a file are in memory from each of some offsets on, without a hole.
std::vector<size_t> in_memory(const std::string& path, const std::vector<size_t>& offsets) {
  const blobstore::internal::File file(path, /*writable=*/false);
  const blobstore::internal::Mapping map(file, 0, file.size(), blobstore::internal::Mapping::Kind::ReadOnly);
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
  const Folder folder;
  const std::string path = folder / "large";
  constexpr size_t kMib = size_t{1} << 20;
  {
    blobstore::internal::OutputFile out(path);
    const std::vector<uint8_t> bytes(64 * kMib, 7);
    out.write(bytes.data(), bytes.size());
    out.commit();
  }
  const blobstore::internal::File file(path, /*writable=*/false);
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
  blobstore::internal::read_ahead(file, {{0, 64 * kMib}}, 0);
  blobstore::internal::read_ahead(file, {}, 64 * kMib);
  CHECK(becomes({0, 32 * kMib}, {0, 0}));
  blobstore::internal::read_ahead(file, {{8 * kMib, kMib}, {32 * kMib, 8 * kMib}}, 6 * kMib);
  CHECK(becomes({0, 8 * kMib, 32 * kMib, 48 * kMib}, {0, kMib, 5 * kMib, 0}));
  // what is there is not asked for, but counts
  blobstore::internal::read_ahead(file, {{8 * kMib, kMib}, {48 * kMib, 8 * kMib}}, 6 * kMib);
  CHECK(becomes({0, 8 * kMib, 48 * kMib}, {0, kMib, 5 * kMib}));
  drop();
  blobstore::internal::read_ahead(file, {{0, 64 * kMib}}, UINT64_MAX);
  CHECK(becomes({0}, {64 * kMib}));
#endif
}

/// Large runs are streamed, wherever they lie; nothing around them changes.
void test_copies() {
  constexpr size_t kMargin = 64;
  const size_t large = blobstore::internal::kWorthStreaming;
  std::vector<uint8_t> from(large + 2 * kMargin);
  for (size_t i = 0; i < from.size(); ++i) {
    from[i] = static_cast<uint8_t>(i * 2'654'435'761 >> 24 | 1);
  }
  for (const size_t size : {size_t{0}, size_t{100}, large - 1, large, large + 1, large + 47}) {
    for (const size_t to : {0, 1, 15, 16, 17}) {
      const size_t source = 7 * to % kMargin;
      std::vector<uint8_t> copied(from.size() + kMargin);
      blobstore::internal::stream_copy(copied.data() + to, from.data() + source, size);
      std::vector<uint8_t> expected(copied.size());
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(source), size, expected.begin() + to);
      CHECK(copied == expected);
    }
  }
}

/// Fresh pages are moved to their place; memory that others map where these were stays.
void test_moved_pages() {
#if BLOBSTORE_LINUX
  using blobstore::internal::File;
  using blobstore::internal::FilePages;
  using blobstore::internal::Mapping;
  const Folder folder;
  const std::string path = folder / "a";
  const size_t size = size_t{5} << 20;
  const std::vector<uint8_t> old(2 * size, 1);
  const std::vector<uint8_t> fresh(size, 2);
  blobstore::internal::OutputFile output(path);
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

int main() {
  executorch::runtime::runtime_init();
  std::signal(SIGXFSZ, SIG_IGN);
  test_save_and_deltas();
  test_empty_blobs();
  test_working_copy();
  test_state_dict();
  test_one_generation();
  test_full_disk();
  test_folder_without_permission();
  test_killed_process();
  test_read_ahead();
  test_copies();
  test_moved_pages();
  return 0;
}
