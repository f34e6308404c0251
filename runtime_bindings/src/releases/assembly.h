// Making the files of a release from what was fetched and what is here.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "format/sha256.h"
#include "os/output_file.h"
#include "releases/device.h"
#include "releases/shopping.h"

namespace blobstore::internal {

/// A content that is here may not be what it was when it was installed.
struct DamagedHere {};

/// Makes what a plan lists. Everything is compared with its digest before it gets its place.
class Assembly {
 public:
  /// @param verified whether contents that are here were compared with their digests already.
  Assembly(const Device& device, const FetchedFiles& fetched, const Shopping& plan, bool verified)
      : device_(device), fetched_(fetched), plan_(plan), verified_(verified) {}
  ~Assembly();
  Assembly(const Assembly&) = delete;
  Assembly& operator=(const Assembly&) = delete;

  /// Make all; the files are in their places, complete and synced, when this returns.
  /// @throws Error Transfer: something was not fetched. Integrity: what was fetched is wrong, and was removed.
  ///   FileAccess. @throws DamagedHere: only if nothing was verified.
  void make_all();

 private:
  class Reader;
  class Writer;
  struct Here {
    const LocalBytes* bytes = nullptr;
    bool doubtful = false; // it was not compared with its digest by this process
  };

  void check_room() const;
  void make_base(size_t content);
  void make_file(const MissingFile& missing);
  void take_whole(const ReleaseObject& object) const;
  void write_content(size_t content, Writer& writer);
  Here find(size_t content) const;
  LocalBytes fetched(const ReleaseObject& object, uint64_t start, uint64_t stop, const std::string& whose) const;
  [[noreturn]] void wrong(const LocalBytes& from, const ReleaseObject& wanted, const std::string& found) const;

  const Device& device_;
  const FetchedFiles& fetched_;
  const Shopping& plan_;
  bool verified_;
  std::map<size_t, LocalBytes> made_; // bases, which are removed in the end
};

} // namespace blobstore::internal
