// What adapters must know about a cache: its foundation, its scales and its LoRA tensors, which adapter was loaded, and
// whose turn it is.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/adapters.h>

#include "adapters/adapter_file.h"
#include "cache/release_commit.h"
#include "format/digest.h"
#include "logical/cache_tensors.h"
#include "os/fair_lock.h"
#include "os/text.h"

namespace blobstore::internal {

/// What does not change while a cache is open.
struct KnownOfCache {
  /// What adapters can be made for: the keys that count of each of its files, and of all files together, in order.
  std::vector<std::vector<std::string>> foundations;
  std::set<std::string>
      recorded; // if there are none, because programs contain theirs: what adapters among its files say
  std::set<double> scales; // that adapters among its files record
  std::vector<NamedTensor> lora; // the LoRA tensors of its programs
  /// From the tables of the rotary embedding: the size of a head if programs rotate neighbouring elements, as Llama's
  /// own code does; 0 if they rotate halves; empty if there are no tables, or they contradict each other.
  std::optional<int64_t> head_dim;
};

/// An adapter, and the factor of its lora_b, which makes up for the scale in the program.
struct ScaledAdapter {
  std::shared_ptr<const Adapter> adapter;
  double factor = 1;
};

/// Makes the digest of a blob that is to count for a foundation.
using DigestOf = std::function<Digest(const Blob&)>;

/// What was loaded last.
struct LoadedAdapters {
  std::vector<ScaledAdapter> adapters; // exactly one, unless they are combined
  std::vector<double> strengths; // one for each
  bool combined = false; // by `load_adapters`
  std::map<std::string, Digest> after; // of the blobs that are made of its tensors, as the last commit left them
};

/// One for each cache, as long as the cache lives. Any thread may use it.
class AdaptersOfCache {
 public:
  /// That of a cache.
  static std::shared_ptr<AdaptersOfCache> of(const std::shared_ptr<const BlobCache>& cache);

  /// What `take_turn` gives.
  struct Turn {
    std::unique_lock<std::mutex> own;
    std::vector<std::pair<std::shared_ptr<AdaptersOfCache>, std::shared_lock<FairLock>>> of_bases;
  };

  /// To hold from the reading of weights until the commit of weights that were computed from them. Meanwhile no base
  /// takes a release. A thread that reads the cache cannot commit, and would keep the thread whose turn it is from it:
  /// @throws Error Unsupported.
  Turn take_turn(const BlobCache& cache);
  /// The same for taking a release: neither this cache nor one above it gets an adapter meanwhile.
  std::pair<Turn, std::unique_lock<FairLock>> take_turn_of_all(const BlobCache& cache);

  /// What adapters must know about the cache; its files are read at the first call. Needs the turn.
  /// @throws Error as `opened_files`.
  std::shared_ptr<const KnownOfCache> known(const CacheTensors& tensors);

  std::shared_ptr<const LoadedAdapters> loaded() const;
  void set_loaded(std::shared_ptr<const LoadedAdapters> loaded);

  /// The adapters of a queue of requests, by name: it compares foundations again before each request whose weights
  /// changed. Null if there is no queue.
  using Requested = std::map<std::string, std::shared_ptr<const Adapter>>;
  std::shared_ptr<const Requested> requested() const;
  void set_requested(std::shared_ptr<const Requested> requested);

  /// A cache, and what was learned about it.
  struct OnCache {
    std::shared_ptr<const BlobCache> cache;
    std::shared_ptr<AdaptersOfCache> state;
    std::shared_ptr<const KnownOfCache> known;
  };
  /// The caches on which `known` was called: this one and those above it.
  static std::vector<OnCache> all_above(const BlobCache& cache);

  /// The digest of a blob of the cache's own files as it is now, without the adapters that are merged into it: their
  /// sum with others is meant. It is computed once for each version of the blob. The caller holds a Reading.
  Digest digest_now(const BlobCache& cache, const Blob& blob);
  /// A merge changed a blob. @param before as `digest_now` gave it. @returns whether that is new: it changed something.
  bool add_merged(const std::string& key, const Digest& before, const Digest& after);
  void remove_merged(const std::string& key, const Digest& after);
  /// The keys of blobs that have an adapter in them now. The caller holds a Reading.
  std::vector<std::string> merged_now(const BlobCache& cache);

 private:
  friend class AllCaches;
  /// The digest of a blob with what is merged into it.
  Digest digest_as_is(const BlobCache& cache, const Blob& blob);

  std::mutex turn_;
  FairLock release_; // a reader for each turn of a cache above, a writer while a release is taken
  // a fork waits until they are whole
  std::shared_ptr<const Requested> requested_;
  std::shared_ptr<const KnownOfCache> known_;
  std::shared_ptr<const LoadedAdapters> loaded_;
  std::map<std::string, std::pair<uint64_t, Digest>, std::less<>> digests_; // of changed blobs, with their versions
  std::map<std::pair<std::string, Digest>, Digest> merged_; // by key and digest with what was merged: that without it
};

/// What the tables of the rotary embedding in files say, as `KnownOfCache::head_dim`. Hugging Face's have the cosines
/// of all elements of a head, twice the same half. Llama's have one for each two neighbours.
std::optional<int64_t> rotary_head_dim(const std::vector<std::unique_ptr<PtdFile>>& files);

/// The fingerprints that an adapter for a cache may record. The caller holds a Reading.
std::set<std::string> foundations_of(const BlobCache& cache, const KnownOfCache& known, const DigestOf& digest_of);
/// `AdaptersOfCache::digest_now` of the blobs of a cache and its bases. The caller holds a Reading.
/// @param replaced digests, by key, that are to count in place of those.
DigestOf digests_now(const BlobCache& cache, std::map<std::string, Digest> replaced = {});

/// Compare the foundation that an adapter was made for with what a cache computes with now, or would with other blobs.
/// What the adapter itself brings may have changed since its files were written.
/// @param replaced as for `digests_now`.
/// @throws Error Adapter: it was made for another one, or does not record its own.
void check_foundation(
    const CacheTensors& tensors,
    const KnownOfCache& known,
    const Adapter& adapter,
    const std::map<std::string, Digest>& replaced = {});

/// What a newer release means for the adapters on its cache, in on_release.cpp: commit what differs between two
/// releases, and with it the release's own adapters; or nothing, if a loaded adapter does not fit. @throws Error as
/// `BlobCache::update`; Unsupported: this thread reads the cache.
void commit_release(ReleaseCommit& commit);

/// Tensors as an update takes them.
std::vector<Given> all_given(const NamedViews& values);
/// Commit tensors. @throws Error as `CacheTensors::update` and `check_reach`; Update: also if one is not finite.
uint64_t commit(const CacheTensors& tensors, const NamedViews& values);

/// The keys of the blobs that an update of a name changes; some of them the cache may lack.
std::vector<std::string> keys_of(const CacheTensors& tensors, const std::string& name);

/// The digests of blobs as they are now, all of one generation. Keys that the cache lacks are left out.
std::map<std::string, Digest> digests_of(const BlobCache& cache, const std::vector<std::string>& keys);
/// The keys of those whose digests differ now.
std::vector<std::string> changed_since(const BlobCache& cache, const std::map<std::string, Digest>& digests);

/// Call a function whose errors about tensors (Adapter, KeyNotFound, Layout, Update) shall begin with the file that the
/// tensors came from.
template <typename Function>
auto with_origin(const std::string& origin, Function function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error& error) {
    const bool about_tensors = error.kind() == ErrorKind::Adapter || error.kind() == ErrorKind::KeyNotFound ||
        error.kind() == ErrorKind::Layout || error.kind() == ErrorKind::Update;
    if (!about_tensors || std::string(error.what()).rfind(origin + ": ", 0) == 0) {
      throw;
    }
    throw_error_in(error.kind(), origin, "{}", error.what());
  }
}

} // namespace blobstore::internal
