// Which tensors a loaded program takes from the cache that it is on: by itself, and by its delegates.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <blobstore/cache.h>

#include "format/text_hash.h"
#include "logical/index.h"
#include "logical/ordered.h"
#include "logical/similar_names.h"
#include "logical/updates.h"
#include "program/program_parts.h"

namespace blobstore::internal {

using NameSet = Ordered<char>;

class TakenWeights {
 public:
  /// @param path for messages. @param parts null if ExecuTorch's own runtime loaded the program and its file is not
  ///   known. @param cache with the index of its records. All must outlive this object.
  /// @param keys if the file is not known, those of the blobs that the program's delegates take, from any source.
  TakenWeights(
      const std::string& path,
      const ProgramParts* parts,
      const BlobCache& cache,
      const Index& index,
      const std::vector<std::string>& keys);
  TakenWeights(const TakenWeights&) = delete;
  TakenWeights& operator=(const TakenWeights&) = delete;

  /// The keys of the tensors that the program itself takes from data files, each with a method that takes it.
  const Ordered<std::string>& externals() const { return externals_; }
  /// The keys that delegates of blobstore take, from the cache or from the program, each with a method.
  const Ordered<std::string>& delegated() const { return delegated_; }
  /// Whether the program takes a tensor from data files without a delegate.
  bool in_data_files(std::string_view name) const { return in_data_files_.count(name) != 0; }
  /// Whether its delegates take it, through the cache.
  bool in_delegates(std::string_view name) const { return in_delegates_.count(name) != 0; }
  /// The names of the tensor under a key, and the key itself.
  Names names_of(const std::string& key) const;
  const BlobCache& cache() const { return cache_; }
  const Index& index() const { return index_; }
  /// Add the names of the program's tensors, also of those that cannot be changed.
  void add_names(NamesInUse& names) const;

 private:
  void find_delegated(const std::string& path, const std::vector<std::string>& keys);
  void find_externals();
  bool is_made(const std::string& key) const;
  bool has_records(const Records& delegate) const;

  const ProgramParts* parts_;
  const BlobCache& cache_;
  const Index& index_;
  Ordered<std::string> externals_;
  Ordered<std::string> delegated_;
  TextSet in_data_files_;
  TextSet in_delegates_;
};

} // namespace blobstore::internal
