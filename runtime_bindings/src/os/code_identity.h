// Which code runs, and on which kind of processor.
#pragma once

#include <string>

namespace blobstore::internal {

/// Bytes that differ between two builds of the library or application that some code or data belongs to: its build
/// id, or else the size and the time of its file. Empty if this system does not say.
///
/// @param address of a function, a constant or a table of virtual functions.
std::string build_of(const void* address);

/// A text that differs between processors for which libraries may choose other code.
const std::string& processor_kind();

} // namespace blobstore::internal
