#include "releases/shopping.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <unistd.h>

#include <blobstore/error.h>

#include "format/constants.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr double kWorth = 0.98; // a file whose parts take more than this share of its bytes is fetched whole

} // namespace

Shopping::Shopping(
    Device& device,
    const FetchedFiles& fetched,
    const ReleaseIndex& index,
    const std::string& sha256,
    const ReleaseParts& parts,
    const std::vector<const ReleaseFile*>& wanted,
    const WaysFile& ways,
    bool verify)
    : device_(device), index_(index), sha256_(sha256), parts_(parts), list_(ways), verify_(verify) {
  std::unordered_map<std::string_view, const std::vector<ReleasePart>*> listed;
  const std::vector<const ReleaseFile*> distinct = index.distinct();
  for (size_t i = 0; i < distinct.size(); ++i) {
    listed.emplace(distinct[i]->object.sha256, &parts.files[i]);
  }
  std::vector<MissingFile> open;
  for (const ReleaseFile* const file : wanted) {
    const bool whole = file->object.size > 0 && fetched.find(file->object, 0, file->object.size);
    (whole ? missing_ : open).push_back({file, whole ? nullptr : listed.at(file->object.sha256)});
  }
  ways_.contents = parts.contents;
  look_for(open);
  read_ways_for(open);
  for (MissingFile& one : open) {
    const double size = static_cast<double>(one.file->object.size);
    if (index.plain && size > 0 && static_cast<double>(cost(*one.parts)) >= kWorth * size) {
      ask(one.file->object, 0, one.file->object.size);
      one.parts = nullptr;
    } else {
      for (const ReleasePart& part : *one.parts) {
        plan(part.content);
      }
    }
    missing_.push_back(one);
  }
}

/// Look for the contents of some files among what is here.
void Shopping::look_for(const std::vector<MissingFile>& files) {
  local_.resize(ways_.contents.size());
  looked_.resize(ways_.contents.size());
  for (const MissingFile& one : files) {
    for (const ReleasePart& part : *one.parts) {
      find(part.content);
    }
  }
}

/// A content that is here, nullptr if it is not; with `verify`, only if it has its digest.
const LocalBytes* Shopping::find(size_t content) {
  if (!looked_[content]) {
    looked_[content] = true;
    const ReleaseObject& wanted = ways_.contents[content];
    const auto found = device_.blobs().find(wanted.sha256);
    if (found != device_.blobs().end() && found->second.size == wanted.size &&
        (!verify_ || has_digest(found->second, wanted.sha256))) {
      local_[content] = &found->second;
    }
  }
  return local_[content];
}

/// Read the list of ways, if something is lacking, and choose among them.
void Shopping::read_ways_for(const std::vector<MissingFile>& files) {
  ways_.ways.resize(ways_.contents.size());
  const bool lacking = std::any_of(files.begin(), files.end(), [&](const MissingFile& one) {
    return std::any_of(
        one.parts->begin(), one.parts->end(), [&](const ReleasePart& part) { return local_[part.content] == nullptr; });
  });
  if (lacking && !(index_.plain && list_.plain)) {
    read_list();
  }
  if (index_.plain) {
    add_whole_files();
  }
  if (list_.plain) {
    for (std::vector<ReleaseWay>& some : ways_.ways) {
      some.erase(
          std::remove_if(
              some.begin(), some.end(), [](const auto& way) { return way.encoding.kind != Encoding::Kind::Raw; }),
          some.end());
    }
  }
  find_bases();
  std::vector<bool> here;
  for (const LocalBytes* const one : local_) {
    here.push_back(one != nullptr);
  }
  made_.resize(here.size());
  best_ = cheapest(ways_.ways, here);
}

/// Replaces the ways, of which none is known yet, by those of the list, if there is one.
void Shopping::read_list() {
  if (list_.required || access(list_.path.c_str(), F_OK) == 0) {
    ways_ = read_ways(read_small(list_.path, kTableLimit), sha256_, parts_, list_.path);
  } else if (!index_.plain) {
    throw_error_in(
        ErrorKind::Release,
        list_.path,
        "the list of the ways to the contents of {} {} is not here; fetch ways.json.zst, too",
        index_.name,
        index_.version);
  }
}

/// Look for the contents that others, which may have to be fetched, are differences to.
void Shopping::find_bases() {
  local_.resize(ways_.contents.size());
  looked_.resize(ways_.contents.size());
  std::vector<size_t> open; // contents that may be needed, whose bases may be, too
  for (size_t content = 0; content < looked_.size(); ++content) {
    if (looked_[content] && local_[content] == nullptr) {
      open.push_back(content);
    }
  }
  while (!open.empty()) {
    const size_t content = open.back();
    open.pop_back();
    for (const ReleaseWay& way : ways_.ways[content]) {
      if (way.base && !looked_[*way.base] && find(*way.base) == nullptr) {
        open.push_back(*way.base);
      }
    }
  }
}

/// Add the ways to contents through the objects that have whole files.
void Shopping::add_whole_files() {
  const std::vector<const ReleaseFile*> files = index_.distinct();
  for (size_t i = 0; i < files.size(); ++i) {
    for (const ReleasePart& part : parts_.files[i]) {
      ways_.ways[part.content].push_back(
          {Encoding(), static_cast<uint32_t>(ways_.objects.size()), part.offset, part.size, std::nullopt});
    }
    ways_.objects.push_back(files[i]->object);
  }
}

/// The bytes to fetch for some parts; those of what cannot be fetched count as they are.
uint64_t Shopping::cost(const std::vector<ReleasePart>& parts) const {
  uint64_t total = 0;
  std::unordered_set<size_t> seen;
  for (const ReleasePart& part : parts) {
    if (seen.insert(part.content).second) {
      const std::optional<Route>& route = best_[part.content];
      total += route ? route->cost : part.size;
    }
  }
  return total;
}

/// Note what must be fetched for a content, and which contents must be made before it.
void Shopping::plan(size_t content) {
  if (local_[content] != nullptr) {
    return;
  }
  ask_for(content);
  std::vector<size_t> chain; // each is a difference to the next one
  for (std::optional<size_t> base = best_[content]->way->base; base && local_[*base] == nullptr && !made_[*base];
       base = best_[*base]->way->base) {
    made_[*base] = true;
    ask_for(*base);
    chain.push_back(*base);
  }
  bases_.insert(bases_.end(), chain.rbegin(), chain.rend());
}

void Shopping::ask_for(size_t content) {
  if (!best_[content]) {
    throw_error_in(
        ErrorKind::Release,
        list_.path,
        "no form of the content {} can be read here; a release that was published with plain (--plain) has whole files",
        ways_.contents[content].sha256);
  }
  const ReleaseWay& way = *best_[content]->way;
  ask(object(way), way.at, way.at + way.stored);
}

void Shopping::ask(const ReleaseObject& object, uint64_t start, uint64_t stop) {
  Asked& asked = asked_.emplace(object.sha256, Asked{object, {}}).first->second;
  if (asked.object.size != object.size) {
    throw_error_in(ErrorKind::InvalidFile, list_.path, "{} occurs with two sizes", object.sha256);
  }
  asked.ranges.emplace_back(start, stop);
}

} // namespace blobstore::internal
