// Releases in an application that downloads itself: what to fetch, and one switch to what was fetched. Nothing here
// uses the network. docs/releases.md describes releases; `blobstore publish` makes them. And the current release in a
// running program.
//
//   // INDEX was fetched from https://models.example.com/assistant/1.3/index.json, and beside it ways.json.zst
//   auto todo = blobstore::missing(INDEX, "/data/app/model");
//   while (!todo.fetches.empty()) {
//     for (const auto& one : todo.fetches) {
//       download("https://models.example.com/" + one.url, one.range, todo.folder + one.file);
//     }
//     todo = blobstore::missing(INDEX, "/data/app/model");
//   }
//   auto release = blobstore::commit(INDEX, "/data/app/model"); // release.path has the files
//
//   auto live = blobstore::Release::open("/data/app/model");
//   auto program = blobstore::Program::load(live->path() + "/serve.pte", live->cache());
//   live->follow(); // after each commit: the weights of a newer release, in one commit to the cache
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/export.h>
#include <blobstore/packed.h>

namespace blobstore BLOBSTORE_API {

/// What a release must be.
struct ReleaseOptions {
  /// The SHA-256 that the index must have, in lower case hexadecimal digits; empty for any. To require a signature,
  /// check that of the index first: this library has no cryptography for keys.
  std::string sha256;
  /// The name and the version that the index must have, those of the URL that it came from; empty for any. A signature
  /// alone is also valid for every other release of the same publisher.
  std::string name;
  std::string version;
  /// Accept a release that is older than the installed one.
  bool allow_rollback = false;
  /// The version of ExecuTorch that the application has; releases whose programs need a newer one are refused. Empty
  /// accepts all.
  std::string executorch = "1.5";
  /// A file with the list of the ways to the contents of the release, which lies beside its index and is fetched like
  /// that; empty for `ways.json.zst` beside the file with the index. Nobody needs to trust it.
  std::string ways;
  /// Decode nothing: only bytes that are stored as they are are listed. That takes more bytes and less time, and works
  /// for every release that was published with `plain`.
  bool plain = false;
};

/// Bytes to fetch into one file.
struct Fetch {
  std::string url; // below the release folder, two folders above that of the index: files/SHA256, packs/ab/SHA256
  std::string range; // the value of the header `Range`, such as bytes=0-99; empty for all bytes
  uint64_t size = 0; // the number of bytes
  std::string sha256; // of the object: that of the fetched file if there is no range
  std::string file; // the name in `Missing::folder`
};

/// What a folder lacks of a release.
struct Missing {
  std::string name; // of the release
  std::string version;
  std::string sha256; // of its index
  bool current = false; // whether it is the current release already, whole, so that there is nothing to do
  uint64_t release_bytes = 0; // size of all files of the release
  uint64_t bytes = 0; // size of everything that is missing
  std::string folder; // where the fetched files go; ends with a separator
  std::vector<Fetch> fetches; // in any order
};

/// A release that is the current one of a folder.
struct InstalledRelease {
  std::string name;
  std::string version;
  std::string sha256; // of its index
  std::string path; // the folder with its files, which are links
  bool changed = false; // whether another release was the current one before
  uint64_t release_bytes = 0; // size of all files of the release
};

/// What `gc` removed.
struct Collected {
  uint64_t releases = 0; // the number of releases
  uint64_t files = 0; // the number of files
  uint64_t nbytes = 0; // their size
  uint64_t in_use = 0; // releases that stay only because a process has them open, as Python's `Release`
};

/// Find what a folder lacks of a release.
///
/// A server may ignore a range: a file with the whole object is taken, too. What is already in `Missing::folder` with
/// the right size is not listed again. The first list has the list of parts, which says what the files consist of:
/// fetch it and call this again, until nothing is left; two calls are enough. Of all forms that a content is published
/// in, and of those of the contents that it is a difference to, the cheapest ones are listed.
///
/// Contents that are here and would be used are compared with their digests, so this reads them from the disk. It waits
/// for other processes that pull into the folder. Any number of threads may call it. The current release stays.
///
/// @param index a file with the index of the release.
/// @param directory the folder of the device; it is made if it is missing.
/// @throws Error FileAccess: a file or the folder cannot be read or written. InvalidFile: the index or a list is
///   malformed, or names something outside the folder. Integrity: the list of parts has another digest. Release: the
///   folder has releases of another name, releases are published in it, the programs need a newer ExecuTorch, or no
///   form of a content can be read here. Trust: the index has another digest, name or version than `options` say, or is
///   older than the installed one.
Missing missing(const std::string& index, const std::string& directory, const ReleaseOptions& options = {});

/// Make a release the current one of a folder, from what was fetched.
///
/// All bytes are compared with their digests before anything refers to them. DIRECTORY/current, a link, leads to the
/// old release or to the new one, whole, at every moment, also if the process is killed; then call it again. Files that
/// a process has mapped stay in its memory. Afterwards the fetched files are gone, and those of older releases stay,
/// until `gc` removes them.
///
/// It reads and writes the files that are new, waits for the disk, and for other processes that pull into the folder.
/// `blobstore pull` leaves the same files.
///
/// @throws Error Transfer: something was not fetched; `missing` lists it. Integrity: what was fetched is wrong; it was
///   removed, so that `missing` lists it again. Otherwise as `missing`. In every case the old release stays current.
InstalledRelease commit(const std::string& index, const std::string& directory, const ReleaseOptions& options = {});

/// Fetches bytes of a URL into a file, which it may replace, by what the application or the system downloads with.
/// Throws if it cannot.
/// @param range the value of the header `Range`; empty for all bytes. It may be ignored.
using Download = std::function<void(const std::string& url, const std::string& range, const std::string& file)>;

/// Take a release by the downloader of the application: fetch its index, call `missing`, fetch what that lists, and
/// call `commit`. Where the release is the current one already, nothing but the index is fetched.
///
/// To require a signature, let `download` check the index, which it fetches first. What was fetched before an error is
/// not fetched again, unless the server has another release by then. Do not call it for one folder in several threads
/// or processes at the same time: each would fetch everything.
///
/// @param url that of the index in a release folder, without a query: …/assistant/1.3/index.json, or that of `latest`.
/// @param directory the folder of the device; it is made if it is missing.
/// @param download called in this thread.
/// @throws Error Input: the URL is not that of an index in a release folder. Or what `download`, `missing` and `commit`
///   throw. In every case the old release stays current.
InstalledRelease pull(
    const std::string& url, const std::string& directory, const Download& download, const ReleaseOptions& options = {});

/// Remove from a folder what its newest releases do not need: the files of older ones, and what was fetched and not
/// committed. Files that a process has mapped stay in its memory. `blobstore gc` leaves the same files.
///
/// It waits for other processes that pull into the folder.
///
/// @param directory the folder of the device.
/// @param keep how many releases stay, with the current one; at least 1.
/// @throws Error Release: no release is installed there, or `keep` is 0. FileAccess: something cannot be removed.
///   InvalidFile, Integrity: the index of a release that stays is damaged; nothing was removed then.
Collected gc(const std::string& directory, uint64_t keep = 1);

/// How a release is opened.
struct OpenOptions {
  /// The names of the data files for the cache; empty for all but adapters.
  std::optional<std::vector<std::string>> data;
  /// Where programs on the cache keep packed weights, see packed.h.
  std::shared_ptr<PackedStore> packed;
  /// As in ReleaseOptions.
  std::string executorch = "1.5";
};

/// A file of an installed release.
struct InstalledFile {
  std::string name; // its path below `Release::path`
  std::string kind; // "program", "data", "adapter" or "other"
  std::vector<std::string> data; // of a program: the names of the data files that it takes keys from
};

/// Which adapters programs run with after a newer release was followed. None stays above a foundation that it was not
/// made for: then nothing is committed, and the result says why.
enum class FollowAdapters {
  /// Those that are loaded.
  Keep,
  /// In place of a loaded adapter that is a file of the release, the file of that name in the newer release, in the
  /// same commit and with the same strength. Other adapters stay.
  Release,
};

/// What `Release::follow` did.
struct Followed {
  std::string version; // of the release that is current in the folder
  std::string sha256; // of its index
  bool taken = false; // whether the cache has its blobs: it had them already, or they were committed
  std::vector<std::string> keys; // whose blobs were committed
  std::vector<std::string> reasons; // why it was not taken: programs, keys, layouts, adapters that do not fit
  /// What is new, changed or gone of adapters that the cache was not opened on, and of files other than programs and
  /// data, such as tokenizers. Nothing reads them again by itself: load such adapters again with `load_adapter`.
  std::vector<std::string> files;
  uint64_t generation = 0; // of the cache
  std::vector<std::string> adapters; // the names of the release's adapters that were exchanged in the commit
  /// The adapters that do not fit the newer foundation, by their paths: loaded ones, which keep it from being taken.
  /// And those of a `RunnerQueue`, by their names: each of their requests fails from now on.
  std::vector<std::string> unfit;
};

/// The current release of a folder in a running program, as Python's `Release`. While it is open, `gc` leaves the files
/// of the release in their place.
///
/// Data files of a release lie beside each other: they are one cache, in which no file covers another one. Adapters are
/// not part of it, because no program takes them by itself; `load_adapter` exchanges them.
///
/// Threads: any thread may call any function at any time. `follow` blocks while another thread follows, and as
/// `BlobCache::update`.
class Release {
 public:
  /// @param directory the folder of the device.
  /// @throws Error Release: no release is installed, it has no such data file, two data files have different contents
  ///   under one key, or its programs need a newer ExecuTorch. FileAccess, InvalidFile, Integrity: files cannot be
  ///   opened or trusted.
  static std::shared_ptr<Release> open(const std::string& directory, const OpenOptions& options = {});
  /// Closes it, but not the cache, which belongs to its holders.
  virtual ~Release() = default;
  Release(const Release&) = delete;
  Release& operator=(const Release&) = delete;

  /// Name and version of the release whose blobs the cache has, and the SHA-256 of its index.
  virtual std::string name() const = 0;
  virtual std::string version() const = 0;
  virtual std::string sha256() const = 0;
  /// The folder with its files: programs, tokenizers. It stays until a newer release is followed, or this is closed.
  virtual std::string path() const = 0;
  /// The files in this folder, and which data files a program takes.
  virtual std::vector<InstalledFile> files() const = 0;
  /// A cache on its data files, in mode Private. It belongs to the caller, too: programs run on it, and it can be
  /// changed. `BlobCache::revert` restores the files that it was opened on, not the release.
  virtual const std::shared_ptr<BlobCache>& cache() const = 0;

  /// Take the blobs of a newer release into the cache, in one commit, if another one was committed to the folder, by
  /// this process or another one.
  ///
  /// Programs on the cache go on: each call has all old weights or all new ones. Only blobs that differ between the two
  /// releases are committed, so other changes that were made to the cache stay. If more than blobs changed, nothing is
  /// committed, and the result says why; open the folder again then. Data files that changed are read and compared.
  ///
  /// Neither is anything committed if an adapter is loaded, on the cache or on one above it, that does not fit the
  /// newer foundation, or that does not record its own. Turn it off with `set_adapter_strength`, load another one, or
  /// keep this release; docs/releases.md says what an application can do for its users' adapters. While this blocks, so
  /// does `load_adapter` on the cache and on those above it.
  ///
  /// @throws Error Closed. Or as `open`, or as `BlobCache::update`. The cache is unchanged then.
  virtual Followed follow(FollowAdapters adapters = FollowAdapters::Keep) = 0;
  /// Close the cache, and let `gc` remove the release once it is no longer current. Programs keep their weights.
  virtual void close() = 0;

 protected:
  Release() = default;
};

} // namespace blobstore
