// Checkpoints: a .ptd with parameters, buffers and an optimizer's tensors, and a list of what belongs to it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "format/ptd_file.h"
#include "training/optimizer_state.h"
#include "training/plain_value.h"

namespace blobstore::internal {

/// One moment of a training run.
struct Checkpoint {
  SavedTensors parameters; // by name
  SavedTensors buffers;
  std::optional<OptimizerState> optimizer;
  std::string frozen; // a digest of the weights that the program uses and does not train; empty if there are none
};

/// The files of a base. If several have a key, the last one counts.
/// @throws Error FileAccess, InvalidFile, Integrity.
std::vector<PtdFile> open_bases(const std::vector<std::string>& paths);

/// Write the tensors that the bases lack, and the list.
///
/// @param inputs files that must not be replaced.
/// @returns the size of the file in bytes.
/// @throws Error OutputPath, FileAccess. KeyConflict: two tensors would have one key.
uint64_t write_checkpoint(
    const std::string& path,
    const Checkpoint& checkpoint,
    const std::vector<PtdFile>& bases,
    const std::map<std::string, std::string>& metadata,
    const std::vector<std::string>& inputs);

/// Read a checkpoint from its file and its base, and compare all tensors with their digests.
///
/// @throws Error FileAccess, InvalidFile, Integrity: the file cannot be opened or trusted, or is not a checkpoint.
///   Checkpoint: the base lacks a tensor or has another one in its place.
Checkpoint read_checkpoint(const std::string& path, const std::vector<PtdFile>& bases);

} // namespace blobstore::internal
