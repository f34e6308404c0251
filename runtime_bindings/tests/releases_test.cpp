// Releases: SHA-256, and two releases that a folder is updated to from what was fetched. Takes no arguments, makes its
// own files in the folder that it runs in, and ends with 1 if something is wrong. tests/releases/test_native.py
// compares the library with the Python package.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/releases.h>

#include "format/sha256.h"
#include "os/link_tree.h"
#include "os/text.h"

namespace {

using blobstore::ErrorKind;
using blobstore::internal::format;
using blobstore::internal::sha256;

void check(bool ok, int line, const char* what) {
  if (!ok) {
    std::fprintf(stderr, "failed at line %d: %s\n", line, what);
    std::exit(1);
  }
}
#define CHECK(condition) check(condition, __LINE__, #condition)

/// The kind of the error that a function throws.
std::optional<ErrorKind> error_of(const std::function<void()>& function) {
  try {
    function();
  } catch (const blobstore::Error& error) {
    return error.kind();
  }
  return std::nullopt;
}

void write(const std::string& path, const std::string& bytes) {
  std::FILE* file = std::fopen(path.c_str(), "wb");
  CHECK(file != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size());
  CHECK(std::fclose(file) == 0);
}

std::string read(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  CHECK(file != nullptr);
  std::string bytes(1 << 16, '\0');
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file));
  std::fclose(file);
  return bytes;
}

std::string digest(const std::string& bytes) {
  return sha256(bytes.data(), bytes.size());
}

/// The examples of FIPS 180-4, and texts of every length around a block, in pieces of every length.
void test_sha256() {
  CHECK(digest("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(
      digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(digest(std::string(1'000'000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  for (size_t size = 0; size < 200; ++size) {
    const std::string text(size, 'x');
    for (size_t piece = 1; piece < 130; piece += 7) {
      blobstore::internal::Sha256 hash;
      for (size_t at = 0; at < size; at += piece) {
        hash.update(text.data() + at, std::min(piece, size - at));
      }
      CHECK(hash.finish() == digest(text));
    }
  }
}

std::string index_of(const std::string& version, int published, const std::string& text) {
  return format(
      "{\"format\":\"blobstore.release.1\",\"name\":\"a\",\"version\":\"{}\",\"published\":{},\"executorch\":\"1.5\","
      "\"files\":[{\"name\":\"b/c.txt\",\"kind\":\"other\",\"sha256\":\"{}\",\"size\":{}}],\"later\":[1,{}]}",
      version,
      published,
      digest(text),
      text.size(),
      published);
}

void test_two_releases(const std::string& device) {
  write("index1.json", index_of("1", 10, "old"));
  write("index2.json", index_of("2", 11, "newer"));
  blobstore::Missing todo = blobstore::missing("index1.json", device);
  CHECK(!todo.current && todo.version == "1" && todo.release_bytes == 3 && todo.bytes == 3);
  CHECK(todo.fetches.size() == 1 && todo.fetches[0].url == "files/" + digest("old") && todo.fetches[0].range.empty());
  CHECK(error_of([&] { blobstore::commit("index1.json", device); }) == ErrorKind::Transfer);
  write(todo.folder + todo.fetches[0].file, "bad");
  CHECK(error_of([&] { blobstore::commit("index1.json", device); }) == ErrorKind::Integrity);
  CHECK(blobstore::missing("index1.json", device).fetches.size() == 1);
  write(todo.folder + todo.fetches[0].file, "old");
  CHECK(blobstore::missing("index1.json", device).fetches.empty());
  const blobstore::InstalledRelease done = blobstore::commit("index1.json", device);
  CHECK(done.changed && done.version == "1" && read(done.path + "/b/c.txt") == "old");
  CHECK(!blobstore::commit("index1.json", device).changed && blobstore::missing("index1.json", device).current);

  todo = blobstore::missing("index2.json", device);
  write(todo.folder + todo.fetches[0].file, "newer");
  CHECK(read(device + "/current/b/c.txt") == "old");
  CHECK(blobstore::commit("index2.json", device).changed && read(device + "/current/b/c.txt") == "newer");
  CHECK(read(done.path + "/b/c.txt") == "old"); // a process that has the old release open keeps it
}

void test_what_is_refused(const std::string& device) {
  CHECK(error_of([&] { blobstore::missing("index1.json", device); }) == ErrorKind::Trust); // older
  blobstore::ReleaseOptions options;
  options.allow_rollback = true;
  CHECK(blobstore::commit("index1.json", device, options).version == "1"); // its file is still here
  options.sha256 = digest("something else");
  CHECK(error_of([&] { blobstore::commit("index2.json", device, options); }) == ErrorKind::Trust);
  options.sha256 = digest(read("index2.json"));
  for (std::string blobstore::ReleaseOptions::* part :
       {&blobstore::ReleaseOptions::name, &blobstore::ReleaseOptions::version}) {
    blobstore::ReleaseOptions another = options; // a signed release under the URL of another one (F4)
    another.*part = "other";
    CHECK(error_of([&] { blobstore::commit("index2.json", device, another); }) == ErrorKind::Trust);
    CHECK(error_of([&] { blobstore::missing("index2.json", device, another); }) == ErrorKind::Trust);
  }
  options.name = "a";
  options.version = "2";
  CHECK(blobstore::commit("index2.json", device, options).changed);
  CHECK(error_of([&] { blobstore::missing("nothing.json", device); }) == ErrorKind::FileAccess);
  for (const char* bytes : {"", "{}", "[1", "{\"format\":\"blobstore.release.1\"}"}) {
    write("bad.json", bytes);
    CHECK(error_of([&] { blobstore::missing("bad.json", device); }) == ErrorKind::InvalidFile);
  }
}

/// The old release is removed with its file, and so is what was fetched.
void test_collecting(const std::string& device) {
  CHECK(error_of([&] { blobstore::gc(device, 0); }) == ErrorKind::Release);
  CHECK(error_of([&] { blobstore::gc("nothing"); }) == ErrorKind::Release);
  write(device + "/incoming/left", "over");
  CHECK(blobstore::gc(device, 2).releases == 0);
  const blobstore::Collected done = blobstore::gc(device);
  CHECK(done.releases == 1 && done.files == 2 && done.in_use == 0); // the old text, and its index
  CHECK(done.nbytes == 3 + read("index1.json").size());
  CHECK(read(device + "/current/b/c.txt") == "newer" && blobstore::gc(device).files == 0);
  CHECK(std::fopen((device + "/incoming/left").c_str(), "rb") == nullptr);
}

} // namespace

int main() {
  blobstore::internal::remove_all("device");
  test_sha256();
  test_two_releases("device");
  test_what_is_refused("device");
  test_collecting("device");
  return 0;
}
