// A .ptd that several processes map and change together.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "format/constants.h"
#include "os/crash_point.h"
#include "os/file.h"

namespace blobstore::internal {

constexpr size_t kWorkingCopyDigits = 32;

/// The id as bytes; empty if a text is no id.
std::optional<std::array<uint8_t, 16>> working_copy_id(const std::string& digits);

/// Call before a working copy is replaced. @throws Error Unsupported: the calling thread reads the one at this path.
void check_unread(const std::string& path);

/// Remove what an earlier file at this path left beside it, when a new working copy has appeared there.
void remove_earlier_state(const std::string& path);

/// Bytes that a commit writes to the file. Does not own them.
struct Patch {
  uint64_t offset = 0;
  const void* data = nullptr;
  uint64_t size = 0;
};

/// The locks, counters and journal of a working copy. They live in a file beside it, `<path>.commits`, which every
/// process maps:
///
///     offset  bytes      what
///     0       8          "BLOBCMT1"
///     8       16         the id of the working copy, as bytes
///     24      8          its inode
///     32      8          its size
///     40      8          number of keys
///     48      8          generation
///     56      8          bytes of a journal that must be replayed, or 0
///     64      8 x keys   version of each key: the generation of its last change
///     next multiple of 4096: the journal: generation (8), number of patches (8), number of keys (8), the keys'
///             numbers (8 each), offset and size of each patch (16 each), the patches' bytes, and the xxh3-128 of all
///             that (16)
///
/// It counts only if it has the id of this copy, its inode and its size, and if its owner could write the copy anyway.
/// A file of an earlier copy, whose inode was used again, is replaced. If the copy was copied together with a journal
/// that must be replayed, its bytes are unknown, and it cannot be opened.
///
/// Two kernel locks (flock) keep processes apart. The kernel releases them when a process dies. The lock on the working
/// copy itself is shared by readers and exclusive for a commit. The lock on the file beside it is a gate that readers
/// and commits pass first, so that a stream of readers cannot keep a commit out.
///
/// Disk space is reserved before bytes are changed through a map, so a full disk is an error and not a signal. The
/// error comes when the copy is opened or when a commit writes its journal, before the mark.
///
/// A commit writes the journal, marks it as pending, changes the file, and removes the mark. The next process that gets
/// the lock and finds the mark replays the journal. So the mark decides whether a commit happens: a process that is
/// killed before it leaves the old bytes, and one that is killed after it leaves the new ones. Other processes see the
/// new bytes when the lock is released.
///
/// Threads: after `open`, any thread may call any function. The lock functions and `commit` block.
class WorkingCopy {
 public:
  /// @param file the working copy, open for reading and writing.
  explicit WorkingCopy(File file);
  ~WorkingCopy();

  /// Check that the file is a working copy, finish a commit that a killed process left, then call `read` with the file
  /// under the exclusive lock; it returns the number of keys.
  template <typename Read>
  void open(Read read) {
    while (!open_if_current(read)) { // otherwise this process would replace the locks of those that have the new file
      file_ = File(file_.path(), /*writable=*/true);
    }
  }

  const File& file() const { return file_; }
  /// See `ThreadReadings::check_none_on`.
  void check_unread() const;
  bool has_locks_on(const File& data, const File& gate) const { return data.is_same(file_) || gate.is_same(gate_); }
  uint64_t generation() const { return header()->generation.load(std::memory_order_acquire); }
  uint64_t version(size_t key) const { return versions()[key].load(std::memory_order_acquire); }

  /// One reader's share of the locks, held while a method runs or bytes are copied. A kernel lock belongs to an open
  /// file, so readers at the same time have open files of their own.
  ///
  /// A forked child inherits the open files and would keep the parent's locks when the parent dies. So the child closes
  /// them, whichever thread they belong to. No other open files are ever locked.
  class Lease {
   public:
    /// @param gate may be closed; then only the data file is locked.
    Lease(const File& data, const File& gate);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    void lock_shared();
    void lock_data(); // without passing the gate
    void lock();
    void unlock();

   private:
    friend class OpenLeases;
    File data_;
    File gate_;
  };
  std::unique_ptr<Lease> lock_shared();
  /// As `lock_shared`, in a forked child whose parent holds the lock, or held it a moment ago.
  std::unique_ptr<Lease> lock_again();
  void unlock_shared(std::unique_ptr<Lease> lease);

  /// Call something under the exclusive lock. The calling thread has no lease.
  template <typename Work>
  void alone(Work work) {
    const Exclusive lock(*this);
    recover();
    work();
  }

  /// Change the file under the exclusive lock. `make` is called under the lock, may look at `generation`, and returns
  /// the patches; if it throws, nothing has changed. `apply` writes one patch to memory that maps the file. `done` is
  /// called under the lock when all bytes have changed; it must not throw.
  template <typename Make, typename Apply, typename Done>
  void commit(const std::vector<uint64_t>& keys, Make make, Apply apply, Done done) {
    const Exclusive lock(*this);
    recover();
    const std::vector<Patch> patches = make();
    begin(keys, patches);
    for (const Patch& patch : patches) {
      apply(patch);
      crash_here(CrashPoint::InApply);
    }
    finish(keys);
    done();
  }

  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  struct Header {
    char magic[8];
    uint8_t id[16];
    uint64_t inode;
    uint64_t size;
    uint64_t keys;
    std::atomic<uint64_t> generation;
    std::atomic<uint64_t> pending;
  };

  class Exclusive {
   public:
    explicit Exclusive(WorkingCopy& copy);
    ~Exclusive();

   private:
    WorkingCopy& copy_;
    std::unique_ptr<Lease> lease_;
    bool opening_;
  };

  Header* header() const { return reinterpret_cast<Header*>(state_.data()); }
  std::atomic<uint64_t>* versions() const { return reinterpret_cast<std::atomic<uint64_t>*>(header() + 1); }
  std::string gate_path() const { return gate_path_of(file_.path()); }
  static std::string gate_path_of(const std::string& path) { return path + ".commits"; }
  friend void check_unread(const std::string& path);
  friend void remove_earlier_state(const std::string& path);
  uint64_t journal_start() const;
  std::unique_ptr<Lease> lease();
  void keep(std::unique_ptr<Lease> lease) noexcept;
  template <typename Read>
  bool open_if_current(Read& read) {
    const Exclusive lock(*this);
    if (!is_at_its_path()) {
      return false;
    }
    id_ = read_id();
    reserve_space();
    find_state();
    recover();
    bind(read(file_));
    return true;
  }
  bool is_at_its_path() const;
  std::array<uint8_t, 16> read_id() const; // @throws Error Unsupported: it is no working copy
  void reserve_space() const;
  void find_state(); // maps the file beside, if it belongs to this working copy
  void bind(uint64_t keys);
  void create(uint64_t keys);
  void recover();
  bool replay(const uint8_t* journal, uint64_t size);
  void begin(const std::vector<uint64_t>& keys, const std::vector<Patch>& patches);
  void finish(const std::vector<uint64_t>& keys);

  File file_;
  std::array<uint8_t, 16> id_{};
  File gate_;
  Mapping state_;
  std::mutex mutex_; // guards spare_
  std::vector<std::unique_ptr<Lease>> spare_;
};

} // namespace blobstore::internal
