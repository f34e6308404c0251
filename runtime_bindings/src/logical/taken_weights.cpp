#include "logical/taken_weights.h"

#include <algorithm>

#include "delegate/delegate_payload.h"
#include "format/constants.h"
#include "format/format_error.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

void add_sources(const std::vector<SourceTensor>& sources, NamesInUse& names) {
  for (const SourceTensor& source : sources) {
    names.emplace(std::string_view(source.name));
  }
}

} // namespace

TakenWeights::TakenWeights(
    const std::string& path,
    const ProgramParts* parts,
    const BlobCache& cache,
    const Index& index,
    const std::vector<std::string>& keys)
    : parts_(parts), cache_(cache), index_(index) {
  find_delegated(path, keys);
  find_externals();
  for (const auto& [key, method] : externals_) {
    for (const std::string_view name : names_of(key)) {
      in_data_files_.insert(name);
    }
  }
  for (const Tensor* tensor : index_.tensors()) {
    const auto& records = tensor->made_into;
    if (std::any_of(records.begin(), records.end(), [&](const Record* record) {
          return delegated_.contains(record->key) && cache_.find(record->key) != nullptr;
        })) {
      in_delegates_.insert(tensor->names.begin(), tensor->names.end());
    }
  }
}

void TakenWeights::find_delegated(const std::string& path, const std::vector<std::string>& keys) {
  if (parts_ == nullptr) {
    for (const std::string& key : keys) {
      delegated_[key];
    }
    return;
  }
  for (const ProgramParts::Delegate& delegate : parts_->delegates) {
    if (delegate.backend != kBackendId) {
      continue;
    }
    try {
      const DelegatePayload payload = read_delegate_payload(delegate.payload.data, delegate.payload.size);
      for (const DelegateConstant& constant : payload.constants) {
        delegated_[constant.key] = delegate.method;
      }
    } catch (const FormatError& error) {
      throw_error_in(ErrorKind::InvalidFile, path, "not the payload of a BlobStoreBackend: {}", error.what());
    }
  }
}

void TakenWeights::find_externals() {
  if (parts_ == nullptr) { // then it may take any of them
    for (const Tensor* tensor : index_.tensors()) {
      for (const std::string_view name : tensor->own_keys) {
        externals_[std::string(name)];
      }
    }
    for (size_t i = 0; i < cache_.size(); ++i) { // no record tells of a method without delegates
      const Blob& blob = cache_.blob(i);
      if (blob.layout && blob.key.rfind(kKeyPrefix, 0) != 0 && !is_made(blob.key)) {
        externals_[blob.key];
      }
    }
    return;
  }
  for (const ProgramParts::External& tensor : parts_->externals) {
    if (cache_.find(tensor.key) != nullptr) {
      externals_[tensor.key] = tensor.method;
    }
  }
}

/// Whether a blob is made for delegates of a part of a graph, rather than a tensor under its own name.
bool TakenWeights::is_made(const std::string& key) const {
  constexpr size_t kDigits = 16; // behind the name
  const size_t at = key.rfind('@');
  return delegated_.contains(key) || is_content_key(key) ||
      (at != std::string::npos && key.size() - at - 1 == kDigits &&
       key.find_first_not_of("0123456789abcdef", at + 1) == std::string::npos);
}

Names TakenWeights::names_of(const std::string& key) const {
  Names names{key};
  if (const Tensor* tensor = index_.find(key)) {
    names.insert(names.end(), tensor->names.begin(), tensor->names.end());
  }
  return names;
}

void TakenWeights::add_names(NamesInUse& names) const {
  for (const TextSet* some : {&in_data_files_, &in_delegates_}) {
    for (const std::string_view name : *some) {
      names.emplace(name);
    }
  }
  for (const std::unique_ptr<Records>& delegate : index_.delegates()) {
    if (has_records(*delegate)) {
      for (const Record& record : delegate->records) {
        add_sources(record.sources, names);
      }
      add_sources(delegate->outside, names);
    }
  }
}

/// Programs do not say which records are theirs: those of blobs that they take or, if the records are of no blob, of
/// tensors. Records that have neither may be of any program.
bool TakenWeights::has_records(const Records& delegate) const {
  bool has_blobs = false;
  for (const Record& record : delegate.records) {
    has_blobs = has_blobs || record.refusal.empty();
    if (record.refusal.empty() && delegated_.contains(record.key)) {
      return true;
    }
  }
  bool used = delegate.outside.empty();
  for (const SourceTensor& source : delegate.outside) {
    used = used || in_data_files_.count(source.name) != 0;
  }
  return used && !has_blobs;
}

} // namespace blobstore::internal
