#include "delegate/constant_sources.h"

#include <map>
#include <set>
#include <utility>

#include "cache/mapped_cache.h"
#include "format/digest.h"
#include "os/file.h"
#include "os/text.h"
#include "packed/load_plan.h"

namespace blobstore::internal {

namespace {

/// Whether a backend may read some bytes where they are. XNNPACK reads them as vectors.
bool readable_in_place(const void* data, size_t size) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && has_room_behind(data, size);
}

/// The cache that a key of this one belongs to.
const BlobCache* owner_of(const BlobCache& cache, const std::string& key) {
  const BlobCache* owner = &cache;
  while (!owner->owns(key)) {
    owner = owner->base().get();
  }
  return owner;
}

void check_size(const DelegateConstant& constant, size_t size) {
  if (size != constant.nbytes) {
    throw Failure{
        EtError::InvalidExternalData,
        ErrorKind::Layout,
        format(
            "blob '{}' has {} bytes, the delegate takes {}; does the data file belong to another program?",
            constant.key,
            size,
            constant.nbytes)};
  }
}

/// Add a key to a list for a message; several constants may have it.
void add_once(const std::string& key, std::string& list) {
  const std::string quoted = format("'{}'", key);
  if (list.find(quoted) == std::string::npos) {
    list += (list.empty() ? "" : ", ") + quoted;
  }
}

} // namespace

ConstantSources::ConstantSources(
    std::shared_ptr<const BlobCache> cache, const et::NamedDataMap* map, const std::vector<DelegateConstant>& constants)
    : cache_(std::move(cache)), constants_(constants) {
  if (cache_) {
    cache_->check_open();
  }
  std::string missing;
  for (const DelegateConstant& constant : constants_) {
    const Blob* blob = cache_ ? cache_->find(constant.key) : nullptr;
    const BlobCache* owner = nullptr;
    if (blob != nullptr) {
      owner = owner_of(*cache_, constant.key);
      check_size(constant, blob->size);
      fixed_.emplace_back();
    } else {
      auto found = map != nullptr ? map->get_data(constant.key) : et::Result<et::FreeableBuffer>(EtError::NotFound);
      if (!found.ok()) {
        add_once(constant.key, missing);
        continue;
      }
      check_size(constant, found->size());
      fixed_.push_back(make_fixed(std::move(found.get())));
    }
    blobs_.push_back(blob);
    owners_.push_back(owner);
  }
  if (!missing.empty()) {
    throw Failure{
        EtError::NotFound,
        ErrorKind::KeyNotFound,
        format(
            "it takes blobs that are in no data file{}{}: {}",
            cache_ ? " of " : "",
            cache_ ? cache_->name() : std::string(),
            missing)};
  }
  fixed_.shrink_to_fit();
}

ConstantSources::Fixed ConstantSources::make_fixed(et::FreeableBuffer&& buffer) {
  Fixed fixed;
  fixed.view = {buffer.data(), buffer.size()};
  const Digest address = digest(fixed.view.data, fixed.view.size);
  fixed.digest.assign(address.begin(), address.end());
  fixed.buffer.emplace(std::move(buffer));
  return fixed;
}

std::vector<Identity> ConstantSources::identify() const {
  std::vector<Identity> identities(blobs_.size());
  for (size_t i = 0; i < blobs_.size(); ++i) {
    if (owners_[i] != nullptr) {
      identities[i] = {owners_[i], mapped(*owners_[i]).version_of(*blobs_[i])};
    }
  }
  return identities;
}

bool ConstantSources::changes(const StagedCommit& commit, size_t i) const {
  return blobs_[i] != nullptr && commit.changes(*blobs_[i]);
}

std::vector<size_t> ConstantSources::changed_by(const StagedCommit& commit) const {
  std::vector<size_t> changed;
  for (size_t i = 0; i < blobs_.size(); ++i) {
    if (changes(commit, i)) {
      changed.push_back(i);
    }
  }
  return changed;
}

uint64_t ConstantSources::bytes_changed(const std::vector<Identity>& before, const std::vector<Identity>& after) const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    bytes += before[i] == after[i] ? 0 : constants_[i].nbytes;
  }
  return bytes;
}

/// The digest of a constant whose bytes are those of a file.
std::optional<std::string> ConstantSources::content(size_t i, const StagedCommit* commit) const {
  const BlobCache* owner = owners_[i];
  if (owner == nullptr) {
    return fixed_[i].digest;
  }
  const std::string& key = constants_[i].key;
  if (written_through(i)) { // there is a file for each working copy
    return owner->mode() == BlobCache::Mode::Shared ? "as the working copy has it" : owner->file_digest(key);
  }
  const bool differs =
      commit != nullptr && changes(*commit, i) ? !commit->restores_file() : owner->differs_from_file(key);
  return differs ? std::nullopt : owner->file_digest(key);
}

std::vector<std::shared_ptr<const BlobName>> ConstantSources::names(
    const InnerSetup& setup, const std::vector<Identity>& identities, const StagedCommit* commit) const {
  struct Group { // of constants that are packed together
    std::string identity;
    bool of_content = true;
  };
  std::map<uint32_t, Group> groups;
  std::vector<std::string> own(identities.size());
  for (size_t i = 0; i < identities.size(); ++i) {
    const DelegateConstant& constant = constants_[i];
    Group& group = groups[constant.group];
    std::optional<std::string> digest;
    if (identities[i].owner == nullptr || setup.named_by_content) {
      digest = content(i, commit);
    }
    std::string& text = own[i];
    text.reserve(constant.key.size() + 96);
    text = constant.key;
    text += '\0';
    if (digest) {
      text += *digest;
      text += std::to_string(constant.nbytes);
    } else {
      text += format("{}:{}", identities[i].owner->id(), identities[i].version);
    }
    text += '\0';
    const Digest& all = setup.payload.digest; // nothing else is known of other operators that take the blob
    constant.packing.empty() ? text.append(all.begin(), all.end()) : text.append(constant.packing);
    group.identity += text;
    group.of_content = group.of_content && digest;
  }
  std::vector<std::shared_ptr<const BlobName>> names;
  names.reserve(identities.size());
  std::string identity;
  for (size_t i = 0; i < identities.size(); ++i) {
    const Group& group = groups[constants_[i].group];
    identity = setup.payload.inner;
    identity += '\0';
    identity += own[i];
    identity += '\0';
    identity += group.identity;
    names.push_back(
        setup.named_by_content && group.of_content ? BlobName::of_content(identity)
                                                   : BlobName::of(identity, commit == nullptr));
  }
  return names;
}

std::vector<size_t> ConstantSources::changed_since_file(const std::vector<size_t>& constants) const {
  std::vector<size_t> found;
  for (const size_t i : constants) {
    if (owners_[i] != nullptr && owners_[i]->differs_from_file(constants_[i].key)) {
      found.push_back(i);
    }
  }
  return found;
}

std::vector<size_t> ConstantSources::of_foundation() const {
  const BlobCache* foundation = cache_ ? &lowest(*cache_) : nullptr;
  std::set<uint32_t> others;
  for (size_t i = 0; i < constants_.size(); ++i) {
    if (owners_[i] != nullptr && owners_[i] != foundation) {
      others.insert(constants_[i].group);
    }
  }
  std::vector<size_t> found;
  for (size_t i = 0; i < constants_.size(); ++i) {
    if (constants_[i].packed && others.count(constants_[i].group) == 0) {
      found.push_back(i);
    }
  }
  return found;
}

std::vector<InnerConstant> ConstantSources::choose_bytes(
    const StagedCommit* commit, std::vector<AlignedCopy>& kept, std::vector<AlignedCopy>& passing) const {
  std::vector<InnerConstant> bytes;
  bytes.reserve(blobs_.size());
  for (size_t i = 0; i < blobs_.size(); ++i) {
    bytes.push_back({blobs_[i] != nullptr ? ConstBytes{blobs_[i]->data, blobs_[i]->size} : fixed_[i].view, nullptr});
  }
  if (commit == nullptr) {
    return bytes;
  }
  for (size_t i = 0; i < blobs_.size(); ++i) {
    ConstBytes& view = bytes[i].view;
    if (view.size == 0 || !changes(*commit, i)) {
      continue;
    }
    const uint8_t* staged = commit->bytes(*blobs_[i]);
    if (!constants_[i].holes.empty()) { // copied into the payload before the backend sees it
      bytes[i].afterwards = view.data;
      view.data = staged;
      continue;
    }
    if (!constants_[i].packed) {
      kept.push_back(aligned_copy(staged, view.size));
      view.data = kept.back().get();
      continue;
    }
    bytes[i].afterwards = view.data;
    if (!readable_in_place(staged, view.size)) {
      passing.push_back(aligned_copy(staged, view.size));
      staged = passing.back().get();
    }
    view.data = staged;
  }
  return bytes;
}

} // namespace blobstore::internal
