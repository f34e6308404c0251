// Made from blobstore/core/constants.py by `make constants`; do not edit.
#pragma once

#include <cstdint>

namespace blobstore::internal {

// of keys that belong to blobstore: records, lists of checkpoints
inline constexpr char kKeyPrefix[] = "metadata.blobstore.";
// of files that are written together with programs, whose keys belong to these
inline constexpr char kOfProgramsKey[] = "blobstore.programs";
// of working copies alone, each with an id that no other one has
inline constexpr char kWorkingCopyKey[] = "blobstore.working_copy";
// the fingerprint of what an adapter was made for
inline constexpr char kFoundationKey[] = "blobstore.adapter.foundation";
// alpha / rank
inline constexpr char kScaleKey[] = "blobstore.adapter.scale";
// what PEFT's form of an adapter has besides
inline constexpr char kPeftKey[] = "blobstore.adapter.peft";
// bytes
inline constexpr uint64_t kSegmentAlignment = 128;
inline constexpr char kManifestIdentifier[] = "BM01";
inline constexpr char kManifestMagic[] = "BLOBMAN1";
inline constexpr char kBackendId[] = "BlobStoreBackend";
inline constexpr char kPayloadIdentifier[] = "BD01";
inline constexpr char kPayloadMagic[] = "BSDELEG1";
inline constexpr uint64_t kPayloadVersion = 1;
// of one constant, so that a small program does not become a large payload
inline constexpr uint64_t kMostHoles = 8;
// bytes at the end of a key that the delegate replaces
inline constexpr uint64_t kKeyVersionSize = 16;
inline constexpr char kRecordsIdentifier[] = "BR01";
inline constexpr uint64_t kRecordsVersion = 0;
// bytes of the largest index
inline constexpr uint64_t kIndexLimit = 67108864;
// bytes of the largest table
inline constexpr uint64_t kTableLimit = 268435456;
// zeros between two parts of a file
inline constexpr uint64_t kHoleLimit = 1048576;
// of a release
inline constexpr uint64_t kMostFiles = 100000;
// bytes between two ranges that cost less than another request
inline constexpr uint64_t kMostGap = 16384;

} // namespace blobstore::internal
