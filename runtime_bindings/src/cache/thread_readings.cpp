#include "cache/thread_readings.h"

#include <algorithm>

#include "os/fork.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

/// The calling thread's; null if it never read.
std::shared_ptr<ThreadReadings>& known() {
  thread_local std::shared_ptr<ThreadReadings> readings;
  return readings;
}

} // namespace

/// Those of all threads. In a forked child only the thread that forked goes on reading.
struct ThreadReadings::All final : ForkAware {
  std::mutex mutex;
  std::vector<ThreadReadings*> threads;

  static All& get() {
    static auto* all = new All; // threads may outlive static destruction
    return *all;
  }

 private:
  All() { enter(); }

  void before_fork() override {
    mutex.lock();
    for (ThreadReadings* thread : threads) {
      thread->mutex_.lock();
    }
  }
  void after_fork_in_parent() override {
    for (ThreadReadings* thread : threads) {
      thread->mutex_.unlock();
    }
    mutex.unlock();
  }
  void after_fork_in_child() override {
    for (ThreadReadings* thread : threads) {
      renew(thread->mutex_);
      if (thread != known().get()) {
        thread->entries_.clear();
      }
    }
    renew(mutex);
  }
};

const std::shared_ptr<ThreadReadings>& ThreadReadings::mine() {
  std::shared_ptr<ThreadReadings>& readings = known();
  if (readings == nullptr) {
    readings = std::make_shared<ThreadReadings>();
  }
  return readings;
}

bool ThreadReadings::any(const BlobCache& cache) {
  const std::shared_ptr<ThreadReadings>& readings = known();
  if (readings == nullptr) {
    return false;
  }
  const std::lock_guard<std::mutex> guard(readings->mutex_);
  return readings->find(cache) != nullptr;
}

void ThreadReadings::check_none_on(const File& data, const File& gate) {
  const std::shared_ptr<ThreadReadings>& readings = known();
  if (readings == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> guard(readings->mutex_);
  for (const Entry& entry : readings->entries_) {
    if (entry.locks->has_locks_on(data, gate)) {
      throw_error_in(
          ErrorKind::Unsupported,
          entry.cache->name(),
          "this thread is reading the working copy through another cache, so it cannot wait for its locks now");
    }
  }
}

void ThreadReadings::lose(const BlobCache& cache) {
  ThreadReadings& readings = *mine();
  const std::lock_guard<std::mutex> guard(readings.mutex_);
  readings.remove(cache);
}

void ThreadReadings::watch_forks() {
  All::get();
}

ThreadReadings::ThreadReadings() {
  All& all = All::get();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.threads.push_back(this);
}

ThreadReadings::~ThreadReadings() {
  All& all = All::get();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.threads.erase(std::find(all.threads.begin(), all.threads.end(), this));
}

bool ThreadReadings::begin(const BlobCache& cache) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Entry* entry = find(cache);
  if (entry == nullptr) {
    return true;
  }
  ++entry->depth;
  return false;
}

void ThreadReadings::add(const BlobCache& cache, const FileLocks& locks) {
  const std::lock_guard<std::mutex> guard(mutex_);
  entries_.push_back({&cache, &locks, 1});
}

bool ThreadReadings::end(const BlobCache& cache) {
  const std::lock_guard<std::mutex> guard(mutex_);
  Entry* entry = find(cache);
  if (entry == nullptr || --entry->depth != 0) { // no entry: it was lost in a forked child
    return false;
  }
  remove(cache);
  return true;
}

ThreadReadings::Entry* ThreadReadings::find(const BlobCache& cache) {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.cache == &cache; });
  return found == entries_.end() ? nullptr : &*found;
}

void ThreadReadings::remove(const BlobCache& cache) {
  if (Entry* entry = find(cache)) {
    std::swap(*entry, entries_.back());
    entries_.pop_back();
  }
}

} // namespace blobstore::internal
