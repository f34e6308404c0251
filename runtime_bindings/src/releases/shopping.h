// What a device lacks of a release, and the cheapest way to get it.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "releases/device.h"
#include "releases/index.h"
#include "releases/parts.h"
#include "releases/ways.h"

namespace blobstore::internal {

/// The list of the ways to the contents of a release.
struct WaysFile {
  std::string path;
  bool required = false; // somebody named it, so it must be there
  bool plain = false; // decode nothing
};

/// A file that is missing.
struct MissingFile {
  const ReleaseFile* file = nullptr;
  const std::vector<ReleasePart>* parts = nullptr; // nullptr if it is fetched whole
};

/// Where the bytes of a content come from.
struct Origin {
  const LocalBytes* local = nullptr;
  const ReleaseWay* way = nullptr; // nullptr if it is here
};

/// Ranges of an object.
struct Asked {
  ReleaseObject object;
  std::vector<Range> ranges;
};

/// How to make the files that are missing.
class Shopping {
 public:
  /// @param sha256 of the index.
  /// @param wanted the files, each content once; those that were fetched whole are made of that.
  /// @param verify compare contents that are here with their digests before anything relies on them.
  /// @throws Error Release: nothing leads to a content. InvalidFile: the list of ways is malformed. FileAccess.
  Shopping(
      Device& device,
      const FetchedFiles& fetched,
      const ReleaseIndex& index,
      const std::string& sha256,
      const ReleaseParts& parts,
      const std::vector<const ReleaseFile*>& wanted,
      const WaysFile& ways,
      bool verify);
  Shopping(const Shopping&) = delete;
  Shopping& operator=(const Shopping&) = delete;

  /// One for each file.
  const std::vector<MissingFile>& missing() const { return missing_; }
  /// Contents to which others are differences and that must be made first, in this order.
  const std::vector<size_t>& bases() const { return bases_; }
  /// What must be fetched, by SHA-256.
  const std::map<std::string, Asked>& asked() const { return asked_; }

  const ReleaseObject& content(size_t number) const { return ways_.contents[number]; }
  const ReleaseObject& object(const ReleaseWay& way) const { return ways_.objects[way.object]; }
  Origin origin(size_t content) const { return {local_[content], best_[content]->way}; }

 private:
  void read_ways_for(const std::vector<MissingFile>& files);
  void read_list();
  void find_bases();
  void add_whole_files();
  void look_for(const std::vector<MissingFile>& files);
  const LocalBytes* find(size_t content);
  uint64_t cost(const std::vector<ReleasePart>& parts) const;
  void plan(size_t content);
  void ask_for(size_t content);
  void ask(const ReleaseObject& object, uint64_t start, uint64_t stop);

  Device& device_;
  const ReleaseIndex& index_;
  const std::string& sha256_;
  const ReleaseParts& parts_;
  const WaysFile& list_;
  bool verify_;
  ReleaseWays ways_;
  std::vector<const LocalBytes*> local_; // of each content
  std::vector<bool> looked_; // whether it was looked for
  std::vector<bool> made_; // whether it is among the bases
  std::vector<std::optional<Route>> best_;
  std::vector<MissingFile> missing_;
  std::vector<size_t> bases_;
  std::map<std::string, Asked> asked_;
};

} // namespace blobstore::internal
