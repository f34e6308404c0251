#include "releases/assembly.h"

#include <algorithm>
#include <array>

#include <blobstore/error.h>

#include "format/format_error.h"
#include "os/link_tree.h"
#include "os/text.h"

namespace blobstore::internal {

/// A range of a file.
class Assembly::Reader {
 public:
  /// @param doubtful whether somebody may have changed the file since it was compared with its digest.
  Reader(const LocalBytes& bytes, bool doubtful) : bytes_(bytes), doubtful_(doubtful) {
    attempt([&] { file_ = File(bytes.path, /*writable=*/false); });
  }

  void read(uint8_t* out, size_t size, uint64_t at) const {
    attempt([&] { file_.read(out, size, bytes_.offset + at); });
  }

 private:
  template <typename Use>
  void attempt(const Use& use) const {
    try {
      use();
    } catch (const Error&) {
      if (doubtful_) {
        throw DamagedHere();
      }
      throw;
    }
  }

  LocalBytes bytes_;
  bool doubtful_;
  File file_;
};

/// A new file and its digest.
class Assembly::Writer {
 public:
  explicit Writer(const std::string& place) : output_(place, OutputFile::Links::Refuse), place_(place) {}

  void write(const uint8_t* data, size_t size) {
    hash_.update(data, size);
    part_.update(data, size);
    output_.write(data, size);
    end_ += size;
  }
  /// Write zeros up to a place.
  void pad(uint64_t until) {
    static constexpr std::array<uint8_t, 1 << 12> zeros = {};
    while (end_ < until) {
      write(zeros.data(), static_cast<size_t>(std::min<uint64_t>(zeros.size(), until - end_)));
    }
  }
  /// Begin with a content.
  void begin() { part_ = Sha256(); }
  /// The digest of what was written since.
  std::string digest() { return part_.finish(); }
  /// Give the file its name. @throws Error Integrity: it has another digest.
  void commit(const std::string& sha256) {
    if (const std::string digest = hash_.finish(); digest != sha256) {
      throw_error_in(ErrorKind::Integrity, place_, "its parts give the SHA-256 {}", digest);
    }
    output_.commit();
  }

 private:
  OutputFile output_;
  std::string place_;
  Sha256 hash_; // of all
  Sha256 part_;
  uint64_t end_ = 0;
};

Assembly::~Assembly() {
  for (const auto& [content, made] : made_) {
    remove_all(made.path);
  }
}

void Assembly::make_all() {
  check_room();
  for (const size_t content : plan_.bases()) {
    make_base(content);
  }
  for (const bool whole : {false, true}) { // parts may be in files that were fetched whole, which move then
    for (const MissingFile& missing : plan_.missing()) {
      if ((missing.parts == nullptr) == whole) {
        make_file(missing);
      }
    }
  }
}

/// Check that the files fit on the disk, before the first byte is written.
void Assembly::check_room() const {
  uint64_t needed = 0;
  const ReleaseObject* largest = nullptr;
  const auto add = [&](const ReleaseObject& object) {
    needed += object.size;
    largest = largest == nullptr || largest->size < object.size ? &object : largest;
  };
  for (const size_t content : plan_.bases()) {
    add(plan_.content(content));
  }
  for (const MissingFile& missing : plan_.missing()) {
    if (missing.parts != nullptr) { // otherwise it only gets another name
      add(missing.file->object);
    }
  }
  if (largest != nullptr) {
    device_.check_room(*largest, needed);
  }
}

/// Make a content to which others are differences.
void Assembly::make_base(size_t content) {
  const ReleaseObject& wanted = plan_.content(content);
  const LocalBytes place{device_.incoming() + "base-" + wanted.sha256, 0, wanted.size};
  Writer writer(place.path);
  write_content(content, writer);
  writer.commit(wanted.sha256);
  made_.emplace(content, place);
}

void Assembly::make_file(const MissingFile& missing) {
  const ReleaseObject& object = missing.file->object;
  if (missing.parts == nullptr) {
    take_whole(object);
    return;
  }
  Writer writer(device_.file(object.sha256));
  for (const ReleasePart& part : *missing.parts) {
    writer.pad(part.offset);
    write_content(part.content, writer);
  }
  writer.pad(object.size);
  writer.commit(object.sha256);
}

/// Give a file that was fetched whole its place.
void Assembly::take_whole(const ReleaseObject& object) const {
  const LocalBytes all = fetched(object, 0, object.size, object.sha256);
  if (const std::string digest = sha256_of(all); digest != object.sha256) {
    wrong(all, object, "found the SHA-256 " + digest);
  }
  keep_as(File(all.path, /*writable=*/false), device_.file(object.sha256));
}

void Assembly::write_content(size_t content, Writer& writer) {
  const ReleaseObject& wanted = plan_.content(content);
  Here here = find(content);
  const ReleaseWay* const way = here.bytes != nullptr ? nullptr : plan_.origin(content).way;
  std::optional<LocalBytes> from;
  if (way != nullptr && way->stored > 0) {
    from = fetched(plan_.object(*way), way->at, way->at + way->stored, wanted.sha256);
  }
  if (way != nullptr) {
    here = way->base ? find(*way->base) : Here();
  }
  std::string reason;
  writer.begin();
  try {
    std::optional<Reader> there;
    std::optional<Reader> base;
    if (from) {
      there.emplace(*from, /*doubtful=*/false);
    }
    if (here.bytes != nullptr) {
      base.emplace(*here.bytes, here.doubtful);
    }
    const auto read = [&](uint8_t* out, size_t size, uint64_t at) { (from ? there : base)->read(out, size, at); };
    const auto read_base = [&](uint8_t* out, size_t size, uint64_t at) { base->read(out, size, at); };
    const auto write = [&](const uint8_t* data, size_t size) { writer.write(data, size); };
    const Encoding encoding = way != nullptr ? way->encoding : Encoding();
    decode(encoding, wanted.size, way != nullptr ? way->stored : wanted.size, read, read_base, write);
  } catch (const FormatError& error) {
    reason = error.what();
  }
  const std::string digest = writer.digest();
  if (reason.empty() && digest == wanted.sha256) {
    return;
  }
  if (here.doubtful) {
    throw DamagedHere();
  }
  wrong(
      from                        ? *from
          : here.bytes != nullptr ? *here.bytes
                                  : LocalBytes{device_.incoming()},
      wanted,
      reason.empty() ? "found the SHA-256 " + digest : reason);
}

/// A content that is here, or was made.
Assembly::Here Assembly::find(size_t content) const {
  if (const LocalBytes* const local = plan_.origin(content).local) {
    return {local, !verified_};
  }
  const auto made = made_.find(content);
  return {made == made_.end() ? nullptr : &made->second, false};
}

/// @throws Error Transfer: nobody fetched these bytes, also if all that is here is sound.
LocalBytes Assembly::fetched(
    const ReleaseObject& object, uint64_t start, uint64_t stop, const std::string& whose) const {
  const std::optional<LocalBytes> found = fetched_.find(object, start, stop);
  if (!found && !verified_) { // the list was made without something that is here and damaged
    throw DamagedHere();
  }
  if (!found) {
    throw_error_in(
        ErrorKind::Transfer, device_.incoming(), "bytes of {} were not fetched; `missing` says which", whose);
  }
  return *found;
}

/// What was fetched is removed, so that it is fetched again.
void Assembly::wrong(const LocalBytes& from, const ReleaseObject& wanted, const std::string& found) const {
  if (from.path.compare(0, device_.incoming().size(), device_.incoming()) == 0) {
    remove_all(from.path);
  }
  throw_error_in(
      ErrorKind::Integrity, from.path, "expected {} bytes with the SHA-256 {}: {}", wanted.size, wanted.sha256, found);
}

} // namespace blobstore::internal
