#include "adapters/foundation.h"

#include <algorithm>
#include <cstring>

#include "adapters/lora_names.h"
#include "format/digest.h"
#include "format/records.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr char kMagic[] = "BSFOUND0";
constexpr char kOpaque = '\xff';

void append(std::string& text, uint64_t number, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) {
    text += static_cast<char>(number >> (8 * i) & 0xff);
  }
}

/// Whether a file records a foundation that it was made for, or has only tensors of an adapter.
bool is_adapter_file(const PtdFile& file) {
  bool any = false;
  bool all = true;
  for (size_t i = 0; i < file.size(); ++i) {
    if (is_content(file.key(i))) {
      any = true;
      all = all && is_lora(file.key(i));
    }
  }
  return file.metadata().count(kFoundationKey) != 0 || (any && all);
}

} // namespace

bool is_content(std::string_view key) {
  return key.rfind(kKeyPrefix, 0) != 0;
}

bool counts(std::string_view key) {
  return is_content(key) && !is_lora(key);
}

uint64_t content_size(const BlobSource& source) {
  uint64_t size = 0;
  for (size_t i = 0; i < source.size(); ++i) {
    size += is_content(source.key(i)) ? source.find(source.key(i))->size : 0;
  }
  return size;
}

std::vector<NamedTensor> named_tensors(const Index& index) {
  const BlobSource& source = index.source();
  std::vector<NamedTensor> found;
  TextSet claimed;
  for (const Tensor* tensor : index.tensors()) {
    std::vector<std::string_view> keys = tensor->names;
    for (const Record* record : tensor->made_into) {
      keys.push_back(record->key);
      claimed.insert(record->key);
    }
    NamedTensor named{
        tensor->name(),
        tensor->scalar_type,
        tensor->sizes,
        0,
        {},
        {std::next(tensor->names.begin()), tensor->names.end()}};
    TextSet seen;
    for (const std::string_view key : keys) {
      const std::optional<SourceBlob> blob = seen.insert(key).second ? source.find(key) : std::nullopt;
      if (blob) {
        named.nbytes += blob->size;
        named.keys.emplace_back(key);
      }
    }
    if (!named.keys.empty() && !tensor->auxiliary) {
      claimed.insert(seen.begin(), seen.end());
      found.push_back(std::move(named));
    }
  }
  for (size_t i = 0; i < source.size(); ++i) {
    const std::string_view key = source.key(i);
    const SourceBlob blob = *source.find(key);
    if (is_content(key) && *blob.layout && claimed.count(key) == 0) {
      const Layout& layout = **blob.layout;
      found.push_back(
          {std::string(key),
           layout.scalar_type,
           std::vector<int64_t>(layout.sizes.begin(), layout.sizes.end()),
           blob.size,
           {std::string(key)},
           {}});
    }
  }
  return found;
}

Foundation::Foundation(const std::vector<const PtdFile*>& files, bool strict)
    : name_(joined(files, " + ", [](const PtdFile* file) { return file->name(); })) {
  for (const PtdFile* file : files) {
    for (size_t i = 0; i < file->size(); ++i) {
      const auto [known, is_new] = index_.emplace(file->key(i), blobs_.size());
      if (is_new) {
        blobs_.push_back({file, i});
      } else if (strict || counts(file->key(i))) {
        const Place& other = blobs_[known->second];
        check_same(file->entry(i).key, *other.file, other.file->blob(other.index), *file, file->blob(i));
      }
    }
  }
}

std::optional<SourceBlob> Foundation::find(std::string_view key) const {
  const auto found = index_.find(key);
  if (found == index_.end()) {
    return std::nullopt;
  }
  const Place& place = blobs_[found->second];
  return place.file->blob(place.index);
}

std::vector<const Foundation::Place*> Foundation::counted() const {
  std::vector<const Place*> places;
  for (const Place& place : blobs_) {
    if (counts(entry(place).key)) {
      places.push_back(&place);
    }
  }
  std::sort(places.begin(), places.end(), [](const Place* a, const Place* b) { return entry(*a).key < entry(*b).key; });
  return places;
}

std::string Foundation::fingerprint() const {
  Fingerprint made;
  for (const Place* place : counted()) {
    const PtdEntry& blob = entry(*place);
    const SourceBlob bytes = place->file->blob(place->index);
    const std::optional<Digest> recorded = place->file->recorded_digest(place->index);
    made.add(blob.key, blob.layout, bytes.size, recorded ? *recorded : digest(bytes.data, bytes.size));
  }
  return made.text();
}

void Fingerprint::add(std::string_view key, const std::optional<Layout>& layout, uint64_t size, const Digest& digest) {
  append(rows_, key.size(), 4);
  rows_ += key;
  if (layout) {
    append(rows_, static_cast<uint8_t>(layout->scalar_type), 1);
    append(rows_, layout->sizes.size(), 1);
    for (const int32_t one : layout->sizes) {
      append(rows_, static_cast<uint64_t>(one), 8);
    }
    rows_.append(layout->dim_order.begin(), layout->dim_order.end());
  } else {
    rows_ += kOpaque;
  }
  append(rows_, size, 8);
  rows_.append(digest.begin(), digest.end());
}

std::string Fingerprint::text() const {
  const std::string text = kMagic + rows_;
  return to_string(digest(text.data(), text.size()));
}

std::vector<std::unique_ptr<PtdFile>> open_foundation(const std::vector<std::string>& paths) {
  if (paths.empty()) {
    throw_error(ErrorKind::Adapter, "a foundation needs at least one file");
  }
  std::vector<std::unique_ptr<PtdFile>> files;
  for (const std::string& path : paths) {
    files.push_back(std::make_unique<PtdFile>(path));
  }
  for (const auto& file : files) {
    if (is_adapter_file(*file)) {
      throw_error_in(ErrorKind::Adapter, file->name(), "this file is an adapter, not a foundation");
    }
  }
  return files;
}

std::vector<const PtdFile*> pointers(const std::vector<std::unique_ptr<PtdFile>>& files) {
  std::vector<const PtdFile*> list;
  for (const auto& file : files) {
    list.push_back(file.get());
  }
  return list;
}

} // namespace blobstore::internal

namespace blobstore BLOBSTORE_API {

std::string foundation_fingerprint(const std::vector<std::string>& paths) {
  const auto files = internal::open_foundation(paths);
  for (const auto& file : files) {
    file->check_length();
  }
  return internal::Foundation(internal::pointers(files), /*strict=*/true).fingerprint();
}

} // namespace blobstore
