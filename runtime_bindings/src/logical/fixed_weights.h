// Weights of a loaded program that no update by name reaches: those that its file contains, and those that another
// backend packed. A constant in a program has no name, so it is recognized by its dtype and shape.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "logical/taken_weights.h"
#include "program/program_parts.h"

namespace blobstore::internal {

/// A tensor of an update.
struct Shaped {
  std::string_view name;
  int8_t scalar_type = -1; // negative: not known, so nothing is recognized by it
  std::vector<int64_t> sizes;
};

/// The names in quotes; only the number of those behind the first ones.
std::string listed(const NameSet& names);
/// How messages call a method, or a program if none is known.
std::string where_in(const std::string& method, const std::string& path);

/// Add a clause for each kind of such weights in a method: which they are if that is known, and the remedy.
///
/// @param path of the program, for messages. @param parts null if its file is not known. @param tensors of the update.
/// @param whole whether they are a whole model's. Then all weights that are out of reach count; otherwise only weights
///   that may be one of them.
/// @throws Error InvalidFile: a record in the program is damaged.
void find_fixed_weights(
    const std::string& path,
    const ProgramParts* parts,
    const TakenWeights& taken,
    const std::vector<Shaped>& tensors,
    bool whole,
    std::vector<std::string>& problems);

} // namespace blobstore::internal
