// One delegate: the handle of its inner backend, and how the handle follows the cache.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include <executorch/runtime/backend/interface.h>

#include <blobstore/cache.h>
#include <blobstore/commit_follower.h>

#include "delegate/constant_sources.h"
#include "delegate/inner_handle.h"
#include "delegate/inner_setup.h"
#include "delegate/load_scope.h"
#include "delegate/packed_units.h"
#include "delegate/served.h"
#include "os/fork.h"

namespace blobstore::internal {

class Delegate final : private ForkAware {
 public:
  /// @param cache where blobs are looked up first; null for one that is offered, if any. @param served whether
  /// `served_delegates` lists it.
  /// @param load may be null: ExecuTorch's own runtime loads the method.
  /// @throws Failure, Error, std::bad_alloc.
  Delegate(
      std::shared_ptr<const BlobCache> cache,
      bool served,
      const LoadScope* load,
      et::BackendInitContext& context,
      const et::FreeableBuffer& processed,
      et::ArrayRef<et::CompileSpec> specs);
  ~Delegate() override;

  /// Run the inner backend on weights of one generation. Calls from several threads take turns.
  EtError execute(et::BackendExecutionContext& context, et::Span<et::EValue*> arguments);

  /// How many exist.
  static uint64_t count();

 private:
  struct Next;
  class Link;

  /// Cuts the link even if the constructor of the delegate throws, so that no cache calls it afterwards.
  struct OwnLink {
    std::shared_ptr<Link> of; // null without a cache
    ~OwnLink();
  };

  std::unique_ptr<CommitFollower::Prepared> prepare(const StagedCommit& commit, std::shared_ptr<Link> link) const;
  std::set<const PackedEntry*> entries_of(const std::vector<size_t>& changed) const;
  void apply(Next& next) noexcept;
  void refresh();
  bool needs_handle(const std::vector<Identity>& identities) const;
  struct PackedChoice {
    std::shared_ptr<PackedFolder> store; // to report to; null for none
    std::string fallback; // why weights are packed to the heap; empty if all are in a file
    std::optional<BlobNames> names; // of the constants, if they are known by now
  };
  struct Packable;
  PackedChoice choose_packed(const LoadScope* load);
  std::shared_ptr<PackedFolder> store_for(const LoadScope* load) const;
  PackedChoice look_up(const LoadScope* load, std::shared_ptr<PackedFolder> store, Packable packable);
  void pack_to_scratch(const LoadScope& load, const Packable& packable);
  BlobNames names_in_file(const Packable& packable, bool building);
  std::shared_ptr<const PackedLease> find_file(const LoadPlan* plan, PackedFolder& store, bool changes) const;
  PackedPlace place_in(
      std::shared_ptr<const PackedLease> file, const std::shared_ptr<PackedFolder>& store, bool changes) const;
  void learn(const LoadScope* load) const;
  std::set<uint32_t> groups_to_repack(const std::vector<PackedUnit>& units) const;
  void use_entries(const LoadScope* load, const Packable& packable);
  void write_through(const std::vector<PackedUnit>& units);
  std::unique_ptr<InnerHandle> make(
      const std::vector<Identity>& identities, const StagedCommit* commit, et::EventTracer* tracer) const;
  std::unique_ptr<InnerHandle> make(BlobNames names, const StagedCommit* commit, et::EventTracer* tracer) const;

  void before_fork() override { mutex_.lock(); } // waits until a running call has ended
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override;

  std::shared_ptr<InnerSetup> setup_; // does not change after the constructor
  std::shared_ptr<const BlobCache> cache_; // may be null
  ConstantSources sources_;
  std::optional<Served> served_; // if ExecuTorch's own runtime loaded it on a cache
  // Guards the members below for callers that hold a Reading. A commit is exclusive and needs no lock.
  std::mutex mutex_;
  uint64_t generation_ = 0; // of the cache, when identities_ were last compared
  std::vector<Identity> identities_; // what inner_ was made from
  std::unique_ptr<InnerHandle> inner_;
  std::shared_ptr<PackedFolder> packed_store_; // to report to; may be null
  std::multimap<size_t, const PackedEntry*> written_; // by constant, the entries that change in place with it
  std::vector<size_t> scales_; // of integers that are written in place
  bool forked_ = false;
  OwnLink link_; // destroyed first
};

} // namespace blobstore::internal
