// Releases: SHA-256, releases that are pulled into a folder, and a release that a running program follows.
//
//   releases_test FILE.ptd
//
// FILE.ptd has float tensors "a" and "b" and opaque bytes "opaque". Makes other files in the folder that it runs in,
// and ends with 1 if something is wrong. tests/releases/test_native.py compares the library with the Python package.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <blobstore/error.h>
#include <blobstore/nothrow.h>
#include <blobstore/reading.h>
#include <blobstore/releases.h>

#include "codec/zstd.h"
#include "format/sha256.h"
#include "helpers.h"
#include "os/folders.h"
#include "os/link_tree.h"
#include "os/text.h"

namespace {

using blobstore::ErrorKind;
using blobstore::internal::format;
using blobstore::internal::sha256;

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

/// A release of one file, in the folder of its version, with its list of ways.
void publish(const std::string& version, int published, const std::string& text, const std::string& ways) {
  const std::string parts =
      format("{\"format\":\"blobstore.parts.1\",\"files\":[[[0,{},\"{}\"]]]}", text.size(), digest(text));
  const std::string index = format(
      "{\"format\":\"blobstore.release.1\",\"name\":\"a\",\"version\":\"{}\",\"published\":{},\"executorch\":\"1.5\","
      "\"files\":[{\"name\":\"b/c.txt\",\"kind\":\"other\",\"sha256\":\"{}\",\"size\":{}}],"
      "\"parts\":[\"{}\",{}],\"later\":[1,{}]}",
      version,
      published,
      digest(text),
      text.size(),
      digest(parts),
      parts.size(),
      published);
  blobstore::internal::make_folder("release" + version);
  write("release" + version + "/parts", parts);
  write("release" + version + "/index.json", index);
  write(
      "release" + version + "/ways.json.zst",
      format("{\"format\":\"blobstore.ways.1\",\"index\":\"{}\",{}}", digest(index), ways));
}

std::string index_of(const std::string& version) {
  return "release" + version + "/index.json";
}

const std::string kPack = "newer, and more";

/// With a downloader: what it is asked for, and that an error of it leaves the old release.
void test_pulling(const std::string& device) {
  const std::string pack = digest(kPack);
  publish("1", 10, "old", format("\"objects\":[[\"{}\",3]],\"bases\":[],\"ways\":[[[\"raw\",0,0,3]]]", digest("old")));
  publish(
      "2",
      11,
      "newer",
      format(
          "\"objects\":[[\"{}\",{},\"packs\"]],\"bases\":[],\"ways\":[[[\"zip\",0,0,1],[\"raw\",0,0,5]]]",
          pack,
          kPack.size()));
  const std::string server = "https://models.example.com/some/releases/";
  const std::map<std::string, std::string> files = {
      {"a/latest/index.json", "release2/index.json"},
      {"a/1/index.json", "release1/index.json"},
      {"a/1/ways.json.zst", "release1/ways.json.zst"},
      {"a/2/ways.json.zst", "release2/ways.json.zst"},
      {"files/" + digest(read("release1/parts")), "release1/parts"},
      {"files/" + digest(read("release2/parts")), "release2/parts"}};
  std::vector<std::string> asked;
  size_t offline_after = 100;
  const blobstore::Download download = [&](const std::string& url, const std::string& range, const std::string& file) {
    CHECK(url.rfind(server, 0) == 0);
    asked.push_back(url.substr(server.size()) + range);
    if (asked.size() > offline_after) {
      throw std::runtime_error("offline");
    }
    const auto known = files.find(url.substr(server.size()));
    write(file, known != files.end() ? read(known->second) : range.empty() ? "old" : kPack); // all of it for a range
  };
  const auto pull = [&](const std::string& version) {
    asked.clear();
    return blobstore::pull(server + "a/" + version + "/index.json", device, download);
  };
  const std::string parts = "files/" + digest(read("release2/parts"));
  const std::string bytes = "packs/" + pack.substr(0, 2) + "/" + pack + "bytes=0-4";
  const blobstore::InstalledRelease first = pull("1");
  CHECK(first.changed && first.version == "1" && read(device + "/current/b/c.txt") == "old");
  for (offline_after = 0; offline_after < 4; ++offline_after) {
    try {
      pull("latest");
      CHECK(false);
    } catch (const std::runtime_error& error) {
      CHECK(std::string(error.what()) == "offline" && read(device + "/current/b/c.txt") == "old");
    }
  }
  offline_after = 100;
  CHECK(pull("latest").changed && read(device + "/current/b/c.txt") == "newer");
  CHECK(read(first.path + "/b/c.txt") == "old"); // a process that has the old release open keeps it
  CHECK((asked == std::vector<std::string>{"a/latest/index.json", "a/2/ways.json.zst", bytes})); // it has the parts
  CHECK(!pull("latest").changed && asked.size() == 1);
  int failed = 0;
  CHECK(blobstore::internal::names_in(device + "/incoming", failed).empty() && failed == 0);
  CHECK(kind_of_error([&] { pull("1"); }) == ErrorKind::Trust && asked.size() == 1);
  for (const char* url :
       {"",
        "index.json",
        "a/index.json",
        "/index.json",
        "a/1/other.json",
        "a/1/index.json?key=b/c/d",
        "http://server/index.json",
        "http://server/1/index.json",
        "http://server"}) {
    CHECK(kind_of_error([&] { blobstore::pull(url, device, download); }) == ErrorKind::Input);
  }
  CHECK(blobstore::nothrow::pull("", device, download).error().kind() == ErrorKind::Input);
  blobstore::internal::remove_all(device);
  blobstore::ReleaseOptions options;
  options.version = "1";
  CHECK(kind_of_error([&] {
          blobstore::pull(server + "a/latest/index.json", device, download, options);
        }) == ErrorKind::Trust);
  asked.clear();
  CHECK(blobstore::nothrow::pull(server + "a/latest/index.json", device, download).ok());
  CHECK((asked == std::vector<std::string>{"a/latest/index.json", "a/2/ways.json.zst", parts, bytes}));
}

/// A signed release under the URL of another one (F4).
void test_other_releases_are_refused(const std::string& device) {
  blobstore::ReleaseOptions options;
  options.sha256 = digest(read(index_of("2")));
  for (std::string blobstore::ReleaseOptions::* part :
       {&blobstore::ReleaseOptions::name, &blobstore::ReleaseOptions::version}) {
    blobstore::ReleaseOptions another = options;
    another.*part = "other";
    CHECK(kind_of_error([&] { blobstore::commit(index_of("2"), device, another); }) == ErrorKind::Trust);
    CHECK(kind_of_error([&] { blobstore::missing(index_of("2"), device, another); }) == ErrorKind::Trust);
  }
  options.name = "a";
  options.version = "2";
  CHECK(blobstore::missing(index_of("2"), device, options).current);
}

/// The files of a release by their names: kinds and contents.
using Files = std::map<std::string, std::pair<std::string, std::string>>;

/// Publish a release of whole files, and make it the current one of a folder.
blobstore::InstalledRelease install(
    const std::string& version, int published, const Files& files, const std::string& device) {
  std::string listed;
  std::string parts;
  std::map<std::string, std::string> objects;
  for (const auto& [name, file] : files) {
    const auto& [kind, bytes] = file;
    listed += format(
        "{}{\"name\":\"{}\",\"kind\":\"{}\",\"sha256\":\"{}\",\"size\":{}{}}",
        listed.empty() ? "" : ",",
        name,
        kind,
        digest(bytes),
        bytes.size(),
        kind == "program" ? ",\"data\":[\"model.ptd\"]" : "");
    if (objects.emplace(digest(bytes), bytes).second) {
      parts += format("{}[[0,{},\"{}\"]]", parts.empty() ? "" : ",", bytes.size(), digest(bytes));
    }
  }
  parts = format("{\"format\":\"blobstore.parts.1\",\"files\":[{}]}", parts);
  objects.emplace(digest(parts), parts);
  write(
      "index.json",
      format(
          "{\"format\":\"blobstore.release.1\",\"name\":\"live\",\"version\":\"{}\",\"published\":{},"
          "\"executorch\":\"1.5\",\"files\":[{}],\"parts\":[\"{}\",{}],\"plain\":true}",
          version,
          published,
          listed,
          digest(parts),
          parts.size()));
  blobstore::ReleaseOptions options;
  options.plain = true;
  for (int round = 0; round < 2; ++round) {
    const blobstore::Missing todo = blobstore::missing("index.json", device, options);
    for (const blobstore::Fetch& one : todo.fetches) {
      CHECK(one.range.empty());
      write(todo.folder + one.file, objects.at(one.sha256));
    }
  }
  return blobstore::commit("index.json", device, options);
}

/// A data file with these numbers.
std::string data_of(const std::string& path, float a, float b) {
  const auto cache = blobstore::BlobCache::open({path});
  for (const auto& [key, value] : {std::pair("a", a), std::pair("b", b)}) {
    cache->update({{key, std::vector<float>(cache->at(key).size / sizeof(float), value)}});
  }
  cache->save("made.ptd");
  return read("made.ptd");
}

/// Commit versions 2 to 6 while one thread reads and two follow.
void commit_while_followed(blobstore::Release& live, Files& files, const std::string& path, const std::string& device) {
  std::atomic<int> committed{0};
  {
    const Repeating reads([&](int) {
      const blobstore::BlobCache::Reading reading(*live.cache());
      CHECK(first(*live.cache(), "a") == first(*live.cache(), "b"));
    });
    const auto follow = [&](int) {
      const blobstore::Followed done = live.follow();
      CHECK(done.taken && done.reasons.empty() && (done.keys.empty() || done.keys.size() == 2));
      committed += done.keys.empty() ? 0 : 1;
      CHECK(read(live.path() + "/tokenizer.json") == "{}");
    };
    const Repeating one(follow);
    const Repeating other(follow);
    for (int version = 2; version <= 6; ++version) {
      const auto value = static_cast<float>(version);
      files["model.ptd"].second = data_of(path, value, value);
      CHECK(install(std::to_string(version), 10 + version, files, device).changed);
      blobstore::gc(device);
    }
    while (live.version() != "6") {
    }
  }
  CHECK(first(*live.cache(), "a") == 6 && committed == static_cast<int>(live.cache()->generation()));
}

/// Readers see one release while another thread commits the next one and several follow it.
void test_following(const std::string& path, const std::string& device) {
  using blobstore::Release;
  CHECK(kind_of_error([&] { Release::open("nowhere"); }) == ErrorKind::Release);
  Files files = {
      {"model.ptd", {"data", data_of(path, 1, 1)}},
      {"serve.pte", {"program", "no program, and never read"}},
      {"tokenizer.json", {"other", "{}"}},
  };
  const std::string first_path = install("1", 10, files, device).path;
  blobstore::OpenOptions options;
  options.executorch = "1.4";
  CHECK(kind_of_error([&] { Release::open(device, options); }) == ErrorKind::Release);
  options.executorch.clear();
  options.data = {"other.ptd"};
  CHECK(kind_of_error([&] { Release::open(device, options); }) == ErrorKind::Release);
  options.data = std::vector<std::string>();
  CHECK(Release::open(device, options)->cache()->size() == 0);
  const auto live = Release::open(device);
  CHECK(live->name() == "live" && live->version() == "1" && live->path() == first_path);
  CHECK(live->files().size() == 3 && live->files()[1].data == std::vector<std::string>{"model.ptd"});
  CHECK(first(*live->cache(), "a") == 1 && live->follow().taken && live->cache()->generation() == 0);

  commit_while_followed(*live, files, path, device);
  CHECK(blobstore::gc(device).in_use == 0);

  files["model.ptd"].second = data_of(path, 7, 7);
  files["serve.pte"].second = "another";
  files["tokenizer.json"].second = "[]";
  install("7", 17, files, device);
  const blobstore::Followed refused = live->follow();
  CHECK(
      !refused.taken && refused.version == "7" && refused.keys.empty() &&
      refused.generation == live->cache()->generation());
  CHECK(refused.reasons == std::vector<std::string>{"the program 'serve.pte' changed"});
  CHECK(refused.files == std::vector<std::string>{"tokenizer.json"});
  CHECK(live->version() == "6" && first(*live->cache(), "a") == 6);
  CHECK(blobstore::gc(device).in_use == 1 && read(live->path() + "/tokenizer.json") == "{}");
  const auto again = blobstore::nothrow::open_release(device);
  CHECK(again.ok() && first(*again.get()->cache(), "a") == 7);
  live->close();
  CHECK(kind_of_error([&] { live->follow(); }) == ErrorKind::Closed);
  CHECK(!blobstore::nothrow::follow(*live).ok() && live->cache()->closed());
  CHECK(blobstore::gc(device).releases == 1);
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    return 64;
  }
  if (blobstore::internal::zstd_version() == nullptr) {
    return 77; // what is fetched here is encoded
  }
  test_sha256();
  blobstore::internal::remove_all("pulled");
  test_pulling("pulled");
  test_other_releases_are_refused("pulled");
  blobstore::internal::remove_all("live");
  test_following(argv[1], "live");
  return 0;
}
