// The followers of one cache, and what they prepare for a commit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <blobstore/commit_follower.h>

#include "os/fork.h"

namespace blobstore::internal {

class Followers {
 public:
  using List = std::vector<std::unique_ptr<CommitFollower::Prepared>>;

  void add(std::weak_ptr<CommitFollower> follower) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto gone = [](const Entry& entry) { return entry.follower.expired(); };
    all_.erase(std::remove_if(all_.begin(), all_.end(), gone), all_.end());
    all_.push_back({++last_, std::move(follower)});
  }

  /// How many have ever been added.
  uint64_t last() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    return last_;
  }

  /// Let all followers prepare that were added after the first `seen`. If the commit fails, here or later, everything
  /// in `out` must be destroyed before the next commit, which reuses this version number for other bytes.
  /// @returns `last` as it was when they were listed.
  uint64_t prepare(const StagedCommit& commit, uint64_t seen, List& out) const {
    uint64_t last = 0;
    for (const auto& follower : living(seen, last)) {
      if (auto prepared = follower->prepare(commit)) {
        out.push_back(std::move(prepared));
      }
    }
    return last;
  }

  bool any_behind() const {
    uint64_t last = 0;
    const auto all = living(0, last);
    return std::any_of(all.begin(), all.end(), [](const auto& follower) { return follower->behind(); });
  }
  void catch_up() const {
    uint64_t last = 0;
    for (const auto& follower : living(0, last)) {
      if (follower->behind()) {
        follower->catch_up();
      }
    }
  }

  static void apply(const List& prepared) noexcept {
    for (const auto& one : prepared) {
      one->apply();
    }
  }

  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child() { renew(mutex_); }

 private:
  struct Entry {
    uint64_t number;
    std::weak_ptr<CommitFollower> follower;
  };

  /// Those that were added after the first `seen`.
  std::vector<std::shared_ptr<CommitFollower>> living(uint64_t seen, uint64_t& last) const {
    std::vector<std::shared_ptr<CommitFollower>> found;
    const std::lock_guard<std::mutex> guard(mutex_);
    last = last_;
    for (const Entry& entry : all_) {
      std::shared_ptr<CommitFollower> follower = entry.number > seen ? entry.follower.lock() : nullptr;
      if (follower != nullptr) {
        found.push_back(std::move(follower));
      }
    }
    return found;
  }

  mutable std::mutex mutex_; // held for moments
  std::vector<Entry> all_;
  uint64_t last_ = 0;
};

} // namespace blobstore::internal
