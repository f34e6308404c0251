// What adapters must know about a cache: its foundation, its scales and its LoRA tensors, which adapter was loaded, and
// whose turn it is.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/adapters.h>

#include "adapters/adapter_file.h"
#include "format/digest.h"
#include "logical/cache_tensors.h"
#include "os/text.h"

namespace blobstore::internal {

/// What does not change while a cache is open.
struct KnownOfCache {
  std::set<std::string> foundations; // the fingerprints that an adapter for this cache may record
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

/// What was loaded last.
struct LoadedAdapters {
  std::vector<ScaledAdapter> adapters; // exactly one, unless they are combined
  bool combined = false; // by `load_adapters`
  std::map<std::string, Digest> after; // of the blobs that are made of its tensors, as the last commit left them
};

/// One for each cache, as long as the cache lives. Any thread may use it.
class AdaptersOfCache {
 public:
  /// That of a cache.
  static std::shared_ptr<AdaptersOfCache> of(const std::shared_ptr<BlobCache>& cache);

  /// To hold from the reading of weights until the commit of weights that were computed from them. A thread that reads
  /// the cache cannot commit, and would keep the thread whose turn it is from it: @throws Error Unsupported.
  std::unique_lock<std::mutex> take_turn(const BlobCache& cache);

  /// What adapters must know about the cache; its files are read at the first call. Needs the turn.
  /// @throws Error as `opened_files`.
  std::shared_ptr<const KnownOfCache> known(const CacheTensors& tensors);

  std::shared_ptr<const LoadedAdapters> loaded() const;
  void set_loaded(std::shared_ptr<const LoadedAdapters> loaded);

 private:
  friend class AllCaches;
  std::mutex turn_;
  // a fork waits until they are whole
  std::shared_ptr<const KnownOfCache> known_;
  std::shared_ptr<const LoadedAdapters> loaded_;
};

/// @throws Error Adapter: an adapter was not made for the foundation of a cache, neither that of its files nor that of
///   its blobs as they are now, or does not record its own.
void check_foundation(const BlobCache& cache, const KnownOfCache& known, const Adapter& adapter);
/// The same for the foundation that blobs with these digests make of that of a cache.
void check_foundation_with(
    const BlobCache& cache, const std::map<std::string, Digest>& replaced, const Adapter& adapter);

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
