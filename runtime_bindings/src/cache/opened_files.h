// The files of a cache as they were when it was opened: their keys, layouts, metadata and digests.
#pragma once

#include <memory>
#include <vector>

#include <blobstore/cache.h>

#include "format/ptd_file.h"

namespace blobstore::internal {

/// Map the files of a cache again, without those of its base. Commits do not show in them; in mode Shared, where a
/// commit changes the file, they show those so far. Files that were renamed, replaced or deleted can still be read.
///
/// The caller holds a Reading of the cache.
/// @throws Error DataChanged: a file was overwritten in place since it was opened, so it no longer describes the cache.
///   FileAccess, InvalidFile, Integrity: a file was truncated or damaged since then. Closed.
std::vector<std::unique_ptr<PtdFile>> opened_files(const BlobCache& cache);

/// The positions of the keys of each file that a working copy was made of. Any other file is one of its own.
/// @throws Error InvalidFile: what the file says of that is malformed.
std::vector<std::vector<size_t>> files_in(const PtdFile& file);

} // namespace blobstore::internal
