// Releases: SHA-256, releases that are pulled into a folder, and a release that a running program follows.
//
//   releases_test FILE.ptd
//
// FILE.ptd has float tensors "a" and "b" and opaque bytes "opaque". Makes other files in the folder that it runs in,
// and ends with 1 if something is wrong. tests/releases/test_native.py compares the library with the Python package.

#include <map>
#include <set>
#include <stdexcept>

#include <blobstore/nothrow.h>
#include <blobstore/releases.h>

#include "codec/zstd.h"
#include "format/sha256.h"
#include "helpers.h"
#include "os/folders.h"
#include "os/link_tree.h"
#include "os/text.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there
using internal::format;
using internal::sha256;

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
      internal::Sha256 hash;
      for (size_t at = 0; at < size; at += piece) {
        hash.update(text.data() + at, std::min(piece, size - at));
      }
      CHECK(hash.finish() == digest(text));
    }
  }
}

/// The files of a release by their names: kinds and contents.
using Files = std::map<std::string, std::pair<std::string, std::string>>;

/// The index and the parts of a release of whole files. @param form what the index says of the form of its objects.
struct Made {
  Made(
      const std::string& name, const std::string& version, int published, const Files& files, const std::string& form) {
    std::string listed;
    std::set<std::string> contents;
    for (const auto& [path, file] : files) {
      const auto& [kind, bytes] = file;
      const char* comma = listed.empty() ? "" : ",";
      const char* data = kind == "program" ? ",\"data\":[\"model.ptd\"]" : "";
      const std::string sha256 = digest(bytes);
      listed += format(
          R"({}{"name":"{}","kind":"{}","sha256":"{}","size":{}{}})", comma, path, kind, sha256, bytes.size(), data);
      if (contents.insert(bytes).second) {
        parts += format(R"({}[[0,{},"{}"]])", parts.empty() ? "" : ",", bytes.size(), sha256);
      }
    }
    parts = format(R"({"format":"blobstore.parts.1","files":[{}]})", parts);
    index = format(
        R"({"format":"blobstore.release.1","name":"{}","version":"{}","published":{},"executorch":"1.5",)"
        R"("files":[{}],"parts":["{}",{}],{}})",
        name,
        version,
        published,
        listed,
        digest(parts),
        parts.size(),
        form);
  }
  std::string index;
  std::string parts;
};

/// A release of one file, in the folder of its version, with its list of ways.
void publish(const std::string& version, int published, const std::string& text, const std::string& ways) {
  const std::string folder = "release" + version;
  const Made made("a", version, published, {{"b/c.txt", {"other", text}}}, format(R"("later":[1,{}])", published));
  internal::make_folder(folder);
  write(folder + "/parts", made.parts);
  write(folder + "/index.json", made.index);
  write(
      folder + "/ways.json.zst", format(R"({"format":"blobstore.ways.1","index":"{}",{}})", digest(made.index), ways));
}

std::string index_of(const std::string& version) {
  return "release" + version + "/index.json";
}

const std::string kPack = "newer, and more";

/// With a downloader: what it is asked for, and that an error of it leaves the old release.
void test_pulling(const std::string& device) {
  const std::string pack = digest(kPack);
  publish("1", 10, "old", format(R"("objects":[["{}",3]],"bases":[],"ways":[[["raw",0,0,3]]])", digest("old")));
  const char* packed = R"("objects":[["{}",{},"packs"]],"bases":[],"ways":[[["zip",0,0,1],["raw",0,0,5]]])";
  publish("2", 11, "newer", format(packed, pack, kPack.size()));
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
  const Download download = [&](const std::string& url, const std::string& range, const std::string& file) {
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
  const InstalledRelease first = pull("1");
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
  CHECK(internal::names_in(device + "/incoming", failed).empty() && failed == 0);
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
  CHECK(nothrow::pull("", device, download).error().kind() == ErrorKind::Input);
  internal::remove_all(device);
  ReleaseOptions options;
  options.version = "1";
  CHECK(kind_of_error([&] {
          blobstore::pull(server + "a/latest/index.json", device, download, options);
        }) == ErrorKind::Trust);
  asked.clear();
  CHECK(nothrow::pull(server + "a/latest/index.json", device, download).ok());
  CHECK((asked == std::vector<std::string>{"a/latest/index.json", "a/2/ways.json.zst", parts, bytes}));
}

/// A signed release under the URL of another one (F4).
void test_other_releases_are_refused(const std::string& device) {
  ReleaseOptions options;
  options.sha256 = digest(read(index_of("2")));
  for (std::string ReleaseOptions::* part : {&ReleaseOptions::name, &ReleaseOptions::version}) {
    ReleaseOptions another = options;
    another.*part = "other";
    CHECK(kind_of_error([&] { commit(index_of("2"), device, another); }) == ErrorKind::Trust);
    CHECK(kind_of_error([&] { missing(index_of("2"), device, another); }) == ErrorKind::Trust);
  }
  options.name = "a";
  options.version = "2";
  CHECK(missing(index_of("2"), device, options).current);
}

/// Publish a release of whole files, and make it the current one of a folder.
InstalledRelease install(const std::string& version, int published, const Files& files, const std::string& device) {
  const Made made("live", version, published, files, R"("plain":true)");
  write("index.json", made.index);
  std::map<std::string, std::string> objects = {{digest(made.parts), made.parts}};
  for (const auto& [path, file] : files) {
    objects.emplace(digest(file.second), file.second);
  }
  ReleaseOptions options;
  options.plain = true;
  for (int round = 0; round < 2; ++round) {
    const Missing todo = missing("index.json", device, options);
    for (const Fetch& one : todo.fetches) {
      CHECK(one.range.empty());
      write(todo.folder + one.file, objects.at(one.sha256));
    }
  }
  return commit("index.json", device, options);
}

/// A data file with these numbers.
std::string data_of(const std::string& path, float a, float b) {
  const auto cache = BlobCache::open({path});
  cache->update({filled(*cache, {"a"}, a)[0], filled(*cache, {"b"}, b)[0]});
  cache->save("made.ptd");
  return read("made.ptd");
}

/// Commit versions 2 to 6 while one thread reads and two follow.
void commit_while_followed(Release& live, Files& files, const std::string& path, const std::string& device) {
  std::atomic<int> committed{0};
  {
    const Repeating reads([&](int) {
      const BlobCache::Reading reading(*live.cache());
      CHECK(first(*live.cache(), "a") == first(*live.cache(), "b"));
    });
    const auto follow = [&](int) {
      const Followed done = live.follow();
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
      gc(device);
    }
    while (live.version() != "6") {
    }
  }
  CHECK(first(*live.cache(), "a") == 6 && committed == static_cast<int>(live.cache()->generation()));
}

/// Readers see one release while another thread commits the next one and several follow it.
void test_following(const std::string& path, const std::string& device) {
  CHECK(kind_of_error([&] { Release::open("nowhere"); }) == ErrorKind::Release);
  Files files = {
      {"model.ptd", {"data", data_of(path, 1, 1)}},
      {"serve.pte", {"program", "no program, and never read"}},
      {"tokenizer.json", {"other", "{}"}},
  };
  const std::string first_path = install("1", 10, files, device).path;
  OpenOptions options;
  options.executorch = "1.4";
  CHECK(kind_of_error([&] { Release::open(device, options); }) == ErrorKind::Release);
  const auto live = Release::open(device);
  CHECK(live->name() == "live" && live->version() == "1" && live->path() == first_path);
  CHECK(live->files().size() == 3 && live->files()[1].data == std::vector<std::string>{"model.ptd"});
  CHECK(first(*live->cache(), "a") == 1 && live->follow().taken && live->cache()->generation() == 0);

  commit_while_followed(*live, files, path, device);
  CHECK(gc(device).in_use == 0);

  files["serve.pte"].second = "another";
  install("7", 17, files, device);
  CHECK(live->follow().reasons == std::vector<std::string>{"the program 'serve.pte' changed"});
  CHECK(live->version() == "6" && nothrow::open_release(device).get()->version() == "7");
  live->close();
  CHECK(kind_of_error([&] { live->follow(); }) == ErrorKind::Closed);
  CHECK(!nothrow::follow(*live).ok() && live->cache()->closed());
  CHECK(gc(device).releases == 1);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  if (internal::zstd_version() == nullptr) {
    return 77; // what is fetched here is encoded
  }
  test_sha256();
  internal::remove_all("pulled");
  test_pulling("pulled");
  test_other_releases_are_refused("pulled");
  internal::remove_all("live");
  test_following(argv[1], "live");
}
