// Made from blobstore/core/constants.py by `make constants`; do not edit.
#pragma once

#include <cstdint>

namespace blobstore::internal {

inline constexpr char kKeyPrefix[] = "metadata.blobstore.";
inline constexpr char kOfProgramsKey[] = "blobstore.programs";
inline constexpr char kWorkingCopyKey[] = "blobstore.working_copy";
inline constexpr char kFoundationKey[] = "blobstore.adapter.foundation";
inline constexpr char kScaleKey[] = "blobstore.adapter.scale";
inline constexpr char kPeftKey[] = "blobstore.adapter.peft";
inline constexpr uint64_t kSegmentAlignment = 128;
inline constexpr char kManifestIdentifier[] = "BM01";
inline constexpr char kManifestMagic[] = "BLOBMAN1";
inline constexpr char kKeyedManifestMagic[] = "BLOBEND1";
inline constexpr char kBackendId[] = "BlobStoreBackend";
inline constexpr char kPayloadIdentifier[] = "BD01";
inline constexpr char kPayloadMagic[] = "BSDELEG1";
inline constexpr uint64_t kPayloadVersion = 1;
inline constexpr uint64_t kPayloadVersionWithHoles = 2;
inline constexpr uint64_t kMostHoles = 8;
inline constexpr uint64_t kKeyVersionSize = 16;
inline constexpr char kRecordsIdentifier[] = "BR01";
inline constexpr uint64_t kRecordsVersion = 0;
inline constexpr uint64_t kIndexLimit = 67108864;
inline constexpr uint64_t kTableLimit = 268435456;
inline constexpr uint64_t kHoleLimit = 1048576;
inline constexpr uint64_t kMostFiles = 100000;
inline constexpr uint64_t kMostGap = 16384;

} // namespace blobstore::internal
