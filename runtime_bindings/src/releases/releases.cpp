#include <blobstore/releases.h>
#include <functional>

#include <algorithm>
#include <ctime>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include <blobstore/error.h>

#include "format/constants.h"
#include "format/sha256.h"
#include "os/folders.h"
#include "os/link_tree.h"
#include "os/output_file.h"
#include "os/paths.h"
#include "os/text.h"
#include "releases/device.h"
#include "releases/index.h"

namespace blobstore {
namespace internal {
namespace {

// As in blobstore/releases/device/shopping.py and transfer.py, so that both ask for the same bytes
constexpr double kWorth = 0.98; // a way that leaves more than this share of the bytes is not worth it
constexpr uint64_t kTableShare = 50; // a table with more than this fraction of its file is not fetched for local blobs
constexpr uint64_t kDay = 86'400; // in seconds, as the times below
constexpr uint64_t kClockIsSet = 1'767'225'600; // 2026; there are no releases from before
constexpr uint64_t kLatest = 4'102'444'800; // 2100

/// A release on its way into a folder.
class Delivery {
 public:
  Delivery(const std::string& index, const std::string& directory, const ReleaseOptions& options)
      : bytes_(read_small(index, kIndexLimit)), sha256_(sha256(bytes_.data(), bytes_.size())) {
    if (!options.sha256.empty() && options.sha256 != sha256_) {
      throw_error_in(
          ErrorKind::Trust, index, "expected the digest sha256:{}, found sha256:{}", options.sha256, sha256_);
    }
    index_ = read_index(bytes_, index);
    check_identity(index, options);
    device_.emplace(directory);
    check_device(index, options);
    check_successor(index, options);
    fetched_.emplace(device_->incoming());
  }

  Missing missing();
  InstalledRelease commit();

 private:
  /// A file that is not here; `table` is set if it can help.
  struct Wanted {
    const ReleaseFile* file;
    bool needs_table = false;
    std::optional<std::vector<ReleasePart>> parts;
  };

  bool is_current() const;
  void check_identity(const std::string& where, const ReleaseOptions& options) const;
  void check_device(const std::string& where, const ReleaseOptions& options) const;
  void check_successor(const std::string& where, const ReleaseOptions& options) const;
  std::vector<Wanted> wanted();
  void read_parts(Wanted& wanted);
  void ask(const ReleaseObject& object, std::vector<Range> ranges, Missing& found) const;
  Positions ask_for_packs(const std::vector<Wanted>& wanted, Missing& found) const;
  std::vector<Range> ranges_of(const Wanted& wanted);
  LocalBytes* local(const ReleasePart& part);
  bool has_sound(const ReleasePart& part);
  std::optional<LocalBytes> whole(const ReleaseFile& file) const;
  void check_room(const std::vector<Wanted>& files) const;
  void make(const Wanted& wanted);
  void write_part(
      const ReleaseFile& file,
      const ReleasePart& part,
      const std::optional<LocalBytes>& all,
      const std::function<void(const uint8_t*, size_t)>& write);
  void assemble(const Wanted& wanted);
  [[noreturn]] void lacks(const ReleaseFile& file) const;

  std::string bytes_;
  std::string sha256_;
  ReleaseIndex index_;
  std::optional<Device> device_;
  std::optional<FetchedFiles> fetched_;
};

bool Delivery::is_current() const {
  if (device_->view() != sha256_) {
    return false;
  }
  try {
    device_->index(sha256_);
  } catch (const Error&) { // the index that is here is damaged
    return false;
  }
  return device_->is_complete(index_, sha256_);
}

void Delivery::check_identity(const std::string& where, const ReleaseOptions& options) const {
  for (const auto& [part, expected, said] :
       {std::tuple("name", options.name, index_.name), std::tuple("version", options.version, index_.version)}) {
    if (!expected.empty() && said != expected) {
      throw_error_in(ErrorKind::Trust, where, "expected the {} '{}', found '{}'", part, expected, said);
    }
  }
}

void Delivery::check_device(const std::string& where, const ReleaseOptions& options) const {
  if (index_.has_programs && !options.executorch.empty() && is_older(options.executorch, index_.executorch) != false) {
    throw_error_in(
        ErrorKind::Release,
        where,
        "the programs of {} {} need ExecuTorch {}, this device has {}",
        index_.name,
        index_.version,
        index_.executorch,
        options.executorch);
  }
}

/// Refuse a release of another name, an older one, or one from the future, as blobstore/releases/index/needs.py does.
void Delivery::check_successor(const std::string& where, const ReleaseOptions& options) const {
  const uint64_t clock = static_cast<uint64_t>(std::max<int64_t>(std::time(nullptr), 0));
  if (index_.published > (clock >= kClockIsSet ? clock + kDay : kLatest)) {
    throw_error_in(
        ErrorKind::Release,
        where,
        "it was published at {} seconds after 1970, {} seconds ahead of this machine's clock; at most a day is "
        "accepted",
        index_.published,
        index_.published - clock);
  }
  const bool accept_older = options.allow_rollback || device_->view().substr(0, 64) == sha256_;
  std::optional<ReleaseMark> old;
  try {
    old = device_->mark();
  } catch (const Error& error) {
    if (accept_older) {
      return; // it is about to be mended
    }
    throw_error_in(
        ErrorKind::Trust,
        where,
        "it is unknown whether version {} is newer than the installed one, because its mark or index is damaged "
        "({}); commit that release again, or allow_rollback",
        index_.version,
        error.what());
  }
  if (!old) {
    return;
  }
  if (old->name != index_.name) {
    throw_error_in(
        ErrorKind::Release,
        where,
        "this is a release of '{}', and the folder has releases of '{}'; use another folder",
        index_.name,
        old->name);
  }
  if (index_.published < old->published && !accept_older) {
    throw_error_in(
        ErrorKind::Trust,
        where,
        "version {} is older than version {}, which is or was installed; allow_rollback accepts it",
        index_.version,
        old->version);
  }
}

/// The files that are not here, each content once; and data files that are damaged, if others are added to them.
std::vector<Delivery::Wanted> Delivery::wanted() {
  std::vector<Wanted> found;
  Positions places;
  const bool adds_data = std::any_of(index_.files.begin(), index_.files.end(), [&](const ReleaseFile& file) {
    return file.kind == "data" && !device_->has(file.object);
  });
  for (const ReleaseFile& file : index_.files) {
    const bool is_here = adds_data && file.kind == "data" ? device_->has_sound(file.object) : device_->has(file.object);
    if (!is_here) {
      const auto [place, is_new] = places.emplace(file.object.sha256, found.size());
      if (is_new) {
        found.emplace_back();
      }
      found[place->second].file = &file;
    }
  }
  return found;
}

/// Read the table of a file, if it can save anything.
void Delivery::read_parts(Wanted& wanted) {
  const ReleaseFile& file = *wanted.file;
  wanted.needs_table = file.table && file.kind == "data" && file.table->size <= file.object.size / kTableShare &&
      !device_->blobs().empty();
  if (!wanted.needs_table) {
    return;
  }
  const bool here = device_->has(*file.table);
  const std::optional<LocalBytes> place = here ? LocalBytes{device_->file(file.table->sha256), 0, file.table->size}
                                               : fetched_->find(*file.table, 0, file.table->size);
  if (!place) {
    return;
  }
  const std::string bytes = read_small(place->path, kTableLimit);
  if (sha256(bytes.data(), bytes.size()) != file.table->sha256) {
    remove_all(place->path);
    throw_error_in(ErrorKind::Integrity, place->path, "this is not the table of '{}'; fetch it again", file.name);
  }
  wanted.parts = read_table(bytes, file.object, place->path);
}

/// A blob that is here and should be the same as a part, or nullptr.
LocalBytes* Delivery::local(const ReleasePart& part) {
  const auto found = device_->blobs().find(part.sha256);
  return found != device_->blobs().end() && found->second.size == part.size ? &found->second : nullptr;
}

/// Whether there is such a blob, and it has its digest.
bool Delivery::has_sound(const ReleasePart& part) {
  LocalBytes* const found = local(part);
  if (found != nullptr && !found->sound) {
    found->sound = false;
    try {
      found->sound = sha256_of(*found) == part.sha256;
    } catch (const Error&) { // it is fetched
    }
  }
  return found != nullptr && *found->sound;
}

/// What is needed of a file with a table: the parts that are not here, or all of it if that is hardly more.
std::vector<Range> Delivery::ranges_of(const Wanted& wanted) {
  const ReleaseFile& file = *wanted.file;
  std::vector<Range> ranges;
  uint64_t cost = 0;
  for (const ReleasePart& part : *wanted.parts) {
    if (!has_sound(part)) {
      ranges.emplace_back(part.offset, part.offset + part.size);
      cost += part.size;
    }
  }
  if (static_cast<double>(cost) < kWorth * static_cast<double>(file.object.size)) {
    return ranges;
  }
  return {{0, file.object.size}};
}

/// List ranges of an object, near ones as one, unless they were fetched.
void Delivery::ask(const ReleaseObject& object, std::vector<Range> ranges, Missing& found) const {
  std::sort(ranges.begin(), ranges.end());
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (range.first == range.second) {
      continue;
    }
    if (!merged.empty() && range.first <= merged.back().second + kMostGap) {
      merged.back().second = std::max(merged.back().second, range.second);
    } else {
      merged.push_back(range);
    }
  }
  for (const auto& [start, stop] : merged) {
    if (!fetched_->find(object, start, stop)) {
      const bool all = start == 0 && stop == object.size;
      found.fetches.push_back(
          {"files/" + object.sha256,
           all ? std::string() : format("bytes={}-{}", start, stop - 1),
           stop - start,
           object.sha256,
           FetchedFiles::name(object, start, stop)});
      found.bytes += stop - start;
    }
  }
}

/// Ask for packs with small files; the digests of these files.
Positions Delivery::ask_for_packs(const std::vector<Wanted>& wanted, Missing& found) const {
  Positions lacking;
  for (const Wanted& one : wanted) {
    lacking.emplace(one.file->object.sha256, 0);
  }
  Positions taken; // with the pack of each
  for (size_t number = 0; number < index_.packs.size(); ++number) {
    const ReleasePack& pack = index_.packs[number];
    std::vector<Range> ranges;
    for (const auto& [position, at] : pack.files) {
      const ReleaseObject& object = index_.files[position].object;
      if (object.size > 0 && lacking.count(object.sha256) > 0 &&
          taken.emplace(object.sha256, number).first->second == number) {
        ranges.emplace_back(at, at + object.size);
      }
    }
    ask(pack.object, std::move(ranges), found);
  }
  return taken;
}

Missing Delivery::missing() {
  Missing found;
  found.name = index_.name;
  found.version = index_.version;
  found.sha256 = sha256_;
  found.release_bytes = index_.size();
  found.folder = device_->incoming();
  found.current = is_current();
  if (found.current) {
    return found;
  }
  std::vector<Wanted> files = wanted();
  const Positions packed = ask_for_packs(files, found);
  for (Wanted& one : files) {
    const ReleaseFile& file = *one.file;
    if (packed.count(file.object.sha256) > 0 || fetched_->find(file.object, 0, file.object.size)) {
      continue;
    }
    read_parts(one);
    if (one.needs_table && !one.parts) {
      ask(*file.table, {{0, file.table->size}}, found);
    } else {
      ask(file.object, one.parts ? ranges_of(one) : std::vector<Range>{{0, file.object.size}}, found);
    }
  }
  return found;
}

void Delivery::lacks(const ReleaseFile& file) const {
  throw_error_in(
      ErrorKind::Transfer,
      device_->incoming(),
      "bytes of '{}', {}, were not fetched; `missing` says which",
      file.name,
      file.object.sha256);
}

/// All bytes of a file, as they were fetched, by themselves or in a pack.
std::optional<LocalBytes> Delivery::whole(const ReleaseFile& file) const {
  const uint64_t size = file.object.size;
  std::optional<LocalBytes> found = fetched_->find(file.object, 0, size);
  for (const ReleasePack& pack : index_.packs) {
    for (const auto& [position, at] : pack.files) {
      if (!found && index_.files[position].object.sha256 == file.object.sha256) {
        found = fetched_->find(pack.object, at, at + size);
      }
    }
  }
  return found;
}

/// Check that the files fit on the disk, before the first byte is written.
void Delivery::check_room(const std::vector<Wanted>& files) const {
  uint64_t needed = 0;
  const ReleaseObject* largest = nullptr;
  for (const Wanted& one : files) {
    const ReleaseObject& object = one.file->object;
    const std::optional<LocalBytes> all = whole(*one.file);
    if (all && all->path == device_->incoming() + object.sha256) {
      continue; // it only gets another name
    }
    needed += std::min(object.size, std::numeric_limits<uint64_t>::max() - needed);
    largest = largest == nullptr || largest->size < object.size ? &object : largest;
  }
  if (largest != nullptr) {
    device_->check_room(*largest, needed);
  }
}

/// Make a file; it is in its place, complete and synced, when this returns.
void Delivery::make(const Wanted& wanted) {
  const ReleaseObject& object = wanted.file->object;
  const std::string place = device_->file(object.sha256);
  const std::optional<LocalBytes> all = whole(*wanted.file);
  if (all && all->path == device_->incoming() + object.sha256) { // it only gets another name
    if (sha256_of(*all) != object.sha256) {
      remove_all(all->path);
      throw_error_in(ErrorKind::Integrity, all->path, "it does not have the SHA-256 that is its name");
    }
    keep_as(File(all->path, /*writable=*/false), place);
    return;
  }
  std::vector<ReleasePart> parts;
  if (all || object.size == 0) {
    parts.push_back({0, object.size, object.sha256});
  } else if (wanted.parts) {
    parts = *wanted.parts;
  } else {
    lacks(*wanted.file);
  }
  OutputFile output(place, OutputFile::Links::Refuse);
  Sha256 hash;
  uint64_t end = 0;
  const std::vector<uint8_t> zeros(1 << 16);
  const auto write = [&](const uint8_t* data, size_t size) {
    hash.update(data, size);
    output.write(data, size);
    end += size;
  };
  const auto pad = [&](uint64_t until) {
    while (end < until) {
      write(zeros.data(), static_cast<size_t>(std::min<uint64_t>(zeros.size(), until - end)));
    }
  };
  for (const ReleasePart& part : parts) {
    pad(part.offset);
    write_part(*wanted.file, part, all, write);
  }
  pad(object.size);
  if (const std::string digest = hash.finish(); digest != object.sha256) {
    throw_error_in(ErrorKind::Integrity, place, "its parts give the SHA-256 {}", digest);
  }
  output.commit();
}

/// Read a part from what was fetched or from what is here, and check it.
void Delivery::write_part(
    const ReleaseFile& file,
    const ReleasePart& part,
    const std::optional<LocalBytes>& all,
    const std::function<void(const uint8_t*, size_t)>& write) {
  std::optional<LocalBytes> from = all ? all : fetched_->find(file.object, part.offset, part.offset + part.size);
  const bool was_fetched = from.has_value();
  if (const LocalBytes* here = from ? nullptr : local(part); here != nullptr) {
    from = *here;
  }
  if (!from && part.size > 0) {
    lacks(file);
  }
  Sha256 hash;
  if (from) {
    read_pieces(*from, [&](const uint8_t* data, size_t size) {
      hash.update(data, size);
      write(data, size);
    });
  }
  if (const std::string digest = hash.finish(); digest != part.sha256) {
    if (was_fetched) {
      remove_all(from->path);
    }
    throw_error_in(
        ErrorKind::Integrity,
        from ? from->path : device_->file(file.object.sha256),
        "expected {} bytes with the SHA-256 {}, found {}",
        part.size,
        part.sha256,
        digest);
  }
}

InstalledRelease Delivery::commit() {
  InstalledRelease done{
      index_.name,
      index_.version,
      sha256_,
      device_->release(sha256_),
      device_->view().substr(0, 64) != sha256_,
      index_.size()};
  if (is_current()) {
    device_->remove_fetched(); // what a process left that was killed when it had switched
    return done;
  }
  std::vector<Wanted> files = wanted();
  check_room(files);
  for (Wanted& one : files) {
    read_parts(one);
    make(one);
  }
  for (const Wanted& one : files) {
    if (one.parts && !device_->has(*one.file->table)) {
      const std::string bytes = read_small(device_->incoming() + one.file->table->sha256, kTableLimit);
      OutputFile output(device_->file(one.file->table->sha256), OutputFile::Links::Refuse);
      output.write(bytes.data(), bytes.size());
      output.commit();
    }
  }
  device_->switch_to(index_, bytes_, sha256_);
  device_->remove_fetched();
  return done;
}

Collected collect(const std::string& directory, uint64_t keep) {
  if (keep == 0) {
    throw_error(ErrorKind::Release, "at least one release must be kept, not 0");
  }
  const std::string folder = absolute_folder(directory);
  if (link_target(format("{}current", folder)).empty()) { // before the folder would be made
    throw_error_in(ErrorKind::Release, folder, "no release is installed here");
  }
  return Device(directory).gc(keep);
}

} // namespace
} // namespace internal

Missing missing(const std::string& index, const std::string& directory, const ReleaseOptions& options) {
  return internal::Delivery(index, directory, options).missing();
}

InstalledRelease commit(const std::string& index, const std::string& directory, const ReleaseOptions& options) {
  return internal::Delivery(index, directory, options).commit();
}

Collected gc(const std::string& directory, uint64_t keep) {
  return internal::collect(directory, keep);
}

} // namespace blobstore
