#include "cache/working_copy.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include <unistd.h>

#include <blobstore/error.h>

#include "cache/thread_readings.h"
#include "format/digest.h"
#include "format/ptd_manifest.h"
#include "format/ptd_reader.h"
#include "os/fork.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr char kMagic[] = "BLOBCMT1";
constexpr size_t kPage = 4096;

int digit_of(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

} // namespace

std::optional<std::array<uint8_t, 16>> working_copy_id(const std::string& digits) {
  std::array<uint8_t, 16> id{};
  if (digits.size() != kWorkingCopyDigits) {
    return std::nullopt;
  }
  for (size_t i = 0; i < digits.size(); ++i) {
    const int digit = digit_of(digits[i]);
    if (digit < 0) {
      return std::nullopt;
    }
    id[i / 2] = static_cast<uint8_t>(id[i / 2] << 4 | digit);
  }
  return id;
}

void check_unread(const std::string& path) {
  ThreadReadings::check_none_on(File(), File::open_if_there(WorkingCopy::gate_path_of(path)));
}

void remove_earlier_state(const std::string& path) {
  WorkingCopy copy(File(path, /*writable=*/true));
  const WorkingCopy::Exclusive lock(copy); // so that no process opens the new file and makes its own state meanwhile
  if (!copy.is_at_its_path()) {
    return; // another process has replaced it, and does the same
  }
  copy.id_ = copy.read_id();
  copy.find_state();
  if (copy.state_.pages() == nullptr) {
    unlink(copy.gate_path().c_str());
  }
}

/// All leases of this process.
class OpenLeases final : ForkAware {
 public:
  using Lease = WorkingCopy::Lease;

  static OpenLeases& get() {
    static auto* leases = new OpenLeases; // caches may outlive static destruction
    return *leases;
  }

  /// No fork happens between opening a lease's files and adding the lease.
  void open(Lease& lease, const File& data, const File& gate) {
    const std::lock_guard<std::mutex> guard(mutex_);
    all_.reserve(all_.size() + 1);
    lease.data_ = data.reopen();
    lease.gate_ = gate.is_open() ? gate.reopen() : File();
    all_.push_back(&lease);
  }

  void close(Lease& lease) {
    const std::lock_guard<std::mutex> guard(mutex_);
    all_.erase(std::remove(all_.begin(), all_.end(), &lease), all_.end());
    lease.data_ = File();
    lease.gate_ = File();
  }

 private:
  OpenLeases() {
    enter();
  } // before any cache with leases, so that a child closes the old ones before caches make new ones

  void before_fork() override { mutex_.lock(); }
  void after_fork_in_parent() override { mutex_.unlock(); }
  void after_fork_in_child() override {
    renew(mutex_);
    for (Lease* lease : all_) {
      lease->data_ = File();
      lease->gate_ = File();
    }
    all_.clear();
  }

  std::mutex mutex_;
  std::vector<Lease*> all_;
};

WorkingCopy::Lease::Lease(const File& data, const File& gate) {
  OpenLeases::get().open(*this, data, gate);
}

WorkingCopy::Lease::~Lease() {
  OpenLeases::get().close(*this);
}

void WorkingCopy::Lease::lock_shared() {
  gate_.lock_shared();
  data_.lock_shared();
  gate_.unlock();
}

void WorkingCopy::Lease::lock_data() {
  data_.lock_shared();
}

void WorkingCopy::Lease::lock() {
  if (gate_.is_open()) {
    gate_.lock_exclusive();
  }
  data_.lock_exclusive();
}

void WorkingCopy::Lease::unlock() {
  data_.unlock();
  gate_.unlock();
}

WorkingCopy::WorkingCopy(File file) : file_(std::move(file)) {}

WorkingCopy::~WorkingCopy() = default;

void WorkingCopy::check_unread() const {
  ThreadReadings::check_none_on(file_, gate_);
}

WorkingCopy::Exclusive::Exclusive(WorkingCopy& copy) : copy_(copy), opening_(!copy.gate_.is_open()) {
  if (opening_) { // another process may have made a gate, and readers may call without pause
    const File gate = File::open_if_there(copy.gate_path());
    ThreadReadings::check_none_on(copy.file_, gate);
    lease_ = std::make_unique<Lease>(copy.file_, gate);
  } else {
    lease_ = copy.lease();
  }
  lease_->lock();
}

WorkingCopy::Exclusive::~Exclusive() {
  lease_->unlock();
  if (!opening_) { // otherwise its gate may have been replaced
    copy_.keep(std::move(lease_));
  }
}

std::unique_ptr<WorkingCopy::Lease> WorkingCopy::lease() {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!spare_.empty()) {
      std::unique_ptr<Lease> lease = std::move(spare_.back());
      spare_.pop_back();
      return lease;
    }
  }
  return std::make_unique<Lease>(file_, gate_);
}

std::unique_ptr<WorkingCopy::Lease> WorkingCopy::lock_shared() {
  std::unique_ptr<Lease> mine = lease();
  mine->lock_shared();
  while (header()->pending.load(std::memory_order_acquire) != 0) { // a process was killed in the middle of a commit
    mine->unlock();
    mine->lock();
    recover();
    mine->unlock();
    mine->lock_shared();
  }
  return mine;
}

std::unique_ptr<WorkingCopy::Lease> WorkingCopy::lock_again() {
  // not through the gate: a commit may hold it while it waits for the parent, and the parent may wait for this process
  std::unique_ptr<Lease> mine = lease();
  mine->lock_data();
  return mine;
}

void WorkingCopy::unlock_shared(std::unique_ptr<Lease> lease) {
  lease->unlock();
  keep(std::move(lease));
}

void WorkingCopy::keep(std::unique_ptr<Lease> lease) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  try {
    spare_.push_back(std::move(lease));
  } catch (const std::bad_alloc&) { // it is closed, and the next reader opens another
  }
}

uint64_t WorkingCopy::journal_start() const {
  return align_up(sizeof(Header) + 8 * header()->keys, kPage);
}

/// Whether the path still leads to this file: while the lock was waited for, another one may have replaced it.
bool WorkingCopy::is_at_its_path() const {
  return File(file_.path(), /*writable=*/true).is_same(file_);
}

std::array<uint8_t, 16> WorkingCopy::read_id() const {
  const uint64_t size = file_.size();
  const Mapping map(file_, 0, size, Mapping::Kind::ReadOnly);
  if (const auto id = working_copy_id(metadata_unverified(map.data(), size, kWorkingCopyKey))) {
    return *id;
  }
  read_ptd(file_.path(), map.data(), size); // says what is wrong with a damaged file
  throw Error(
      ErrorKind::Unsupported,
      file_.path(),
      "this is not a working copy, and processes that share a file change it for good; make_working_copy makes one of "
      "it");
}

/// A tool may have copied the file with holes, which would need disk space when they are written through a map.
void WorkingCopy::reserve_space() const {
  const FileStatus status = file_.status();
  if (status.stored < status.size) {
    file_.reserve(0, status.size);
  }
}

void WorkingCopy::find_state() {
  File gate = File::open_if_there(gate_path());
  if (!gate.is_open() || gate.size() < sizeof(Header)) { // a link is replaced
    return;
  }
  Mapping first(gate, 0, sizeof(Header), Mapping::Kind::Shared);
  const auto* there = reinterpret_cast<const Header*>(first.data());
  const FileStatus status = file_.status();
  if (std::memcmp(there->magic, kMagic, 8) != 0 || std::memcmp(there->id, id_.data(), id_.size()) != 0) {
    return; // it belongs to another file, which this one replaced
  }
  if (!gate.is_as_safe_as(file_)) {
    throw Error(
        ErrorKind::FileAccess,
        gate.path(),
        format(
            "user {} owns it, or others may write to it, who must not write to {}; remove it",
            gate.status().user,
            file_.path()),
        EPERM);
  }
  // volumes may get another device number when they are mounted, so only inodes are compared
  if (there->inode != status.inode || there->size != status.size || there->keys > (gate.size() - sizeof(Header)) / 8) {
    if (there->pending.load(std::memory_order_acquire) != 0) {
      throw Error(
          ErrorKind::Integrity,
          file_.path(),
          format(
              "it was copied while a commit was under way, so that it holds neither the old nor the new weights, and "
              "{} "
              "is about the original; make the working copy again",
              gate.path()));
    }
    return;
  }
  gate.reserve(0, sizeof(Header) + 8 * there->keys);
  state_ = Mapping(gate, 0, sizeof(Header) + 8 * there->keys, Mapping::Kind::Shared);
  gate_ = std::move(gate);
}

void WorkingCopy::bind(uint64_t keys) {
  if (state_.pages() == nullptr || header()->keys != keys) {
    create(keys);
  }
}

void WorkingCopy::create(uint64_t keys) {
  TemporaryFile gate(gate_path()); // another process that opens the file now makes its own
  const FileStatus status = file_.status();
  const size_t size = sizeof(Header) + 8 * keys;
  gate.file().set_mode(status.mode & 0777); // a process that may map the weights may join the commits
  gate.file().reserve(0, align_up(size, kPage));
  Mapping state(gate.file(), 0, size, Mapping::Kind::Shared);
  auto* header = reinterpret_cast<Header*>(state.data());
  std::memcpy(header->magic, kMagic, 8);
  std::memcpy(header->id, id_.data(), id_.size());
  header->inode = status.inode;
  header->size = status.size;
  header->keys = keys;
  gate_ = gate.appear();
  state_ = std::move(state);
}

void WorkingCopy::begin(const std::vector<uint64_t>& keys, const std::vector<Patch>& patches) {
  crash_here(CrashPoint::BeforeJournal);
  std::vector<uint64_t> table{generation() + 1, patches.size(), keys.size()};
  table.insert(table.end(), keys.begin(), keys.end());
  uint64_t bytes = 0;
  for (const Patch& patch : patches) {
    table.push_back(patch.offset);
    table.push_back(patch.size);
    bytes += patch.size;
  }
  const uint64_t start = journal_start();
  const uint64_t size = 8 * table.size() + bytes;
  const uint64_t end = align_up(start + size + sizeof(Digest), kPage);
  gate_.truncate(end); // gives back what the last commit took
  gate_.reserve(start, end - start);
  uint64_t at = start;
  gate_.write(table.data(), 8 * table.size(), at);
  at += 8 * table.size();
  crash_here(CrashPoint::InJournal);
  for (const Patch& patch : patches) {
    gate_.write(patch.data, patch.size, at);
    at += patch.size;
  }
  const Mapping journal(gate_, start, size, Mapping::Kind::ReadOnly);
  const Digest sum = digest(journal.data(), size);
  gate_.write(sum.data(), sum.size(), at);
  crash_here(CrashPoint::AfterJournal);
  header()->pending.store(size, std::memory_order_release);
  crash_here(CrashPoint::AfterPending);
}

void WorkingCopy::finish(const std::vector<uint64_t>& keys) {
  crash_here(CrashPoint::AfterApply);
  const uint64_t generation = header()->generation.load(std::memory_order_relaxed) + 1;
  for (const uint64_t key : keys) {
    versions()[key].store(generation, std::memory_order_relaxed);
  }
  header()->generation.store(generation, std::memory_order_release);
  crash_here(CrashPoint::BeforeDone);
  header()->pending.store(0, std::memory_order_release);
  crash_here(CrashPoint::AfterDone);
}

/// Finish the commit of a process that was killed after it had marked its journal.
void WorkingCopy::recover() {
  if (state_.pages() == nullptr) {
    return; // a new working copy
  }
  const uint64_t size = header()->pending.load(std::memory_order_acquire);
  if (size == 0) {
    return;
  }
  const uint64_t start = journal_start();
  const auto damaged = [&] {
    return Error(
        ErrorKind::Integrity,
        gate_.path(),
        format(
            "a commit was interrupted and its journal is damaged, so {} holds neither the old nor the new weights; "
            "make the working copy again",
            file_.path()));
  };
  const uint64_t present = gate_.size();
  if (size < 24 || present < start + sizeof(Digest) || size > present - start - sizeof(Digest)) {
    throw damaged();
  }
  const Mapping journal(gate_, start, size + sizeof(Digest), Mapping::Kind::ReadOnly);
  if (std::memcmp(digest(journal.data(), size).data(), journal.data() + size, sizeof(Digest)) != 0) {
    throw damaged();
  }
  if (!replay(journal.data(), size)) {
    throw damaged();
  }
}

/// @returns false, before anything is written, if the journal is not for this file.
bool WorkingCopy::replay(const uint8_t* data, uint64_t size) {
  const auto word = [&](uint64_t index) {
    uint64_t value;
    std::memcpy(&value, data + 8 * index, sizeof value);
    return value;
  };
  const uint64_t patches = word(1);
  const uint64_t keys = word(2);
  const uint64_t words = size / 8 - 3;
  if (keys > words || patches > (words - keys) / 2) {
    return false;
  }
  uint64_t at = 8 * (3 + keys + 2 * patches);
  uint64_t left = size - at;
  for (uint64_t i = 0; i < patches; ++i) {
    const uint64_t offset = word(3 + keys + 2 * i);
    const uint64_t length = word(3 + keys + 2 * i + 1);
    if (length > left || offset > header()->size || length > header()->size - offset) {
      return false;
    }
    left -= length;
  }
  if (left != 0) {
    return false;
  }
  for (uint64_t i = 0; i < patches; ++i) {
    const uint64_t offset = word(3 + keys + 2 * i);
    const uint64_t length = word(3 + keys + 2 * i + 1);
    file_.write(data + at, length, offset);
    at += length;
  }
  for (uint64_t i = 0; i < keys; ++i) {
    if (word(3 + i) < header()->keys) {
      versions()[word(3 + i)].store(word(0), std::memory_order_relaxed);
    }
  }
  header()->generation.store(word(0), std::memory_order_release);
  header()->pending.store(0, std::memory_order_release);
  return true;
}

void WorkingCopy::after_fork_in_child() {
  renew(mutex_);
  spare_.clear();
}

} // namespace blobstore::internal
