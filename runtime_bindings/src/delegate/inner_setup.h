// What the inner backend of a delegate is initialized with, every time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/backend/options.h>

#include "delegate/delegate_payload.h"
#include "delegate/failure.h"
#include "packed/packed_copy.h"
#include "packed/packed_folder.h"
#include "packed/packed_pages.h"

namespace blobstore::internal {

/// The file of a delegate's packed weights, for every handle.
struct PackedPlace {
  std::shared_ptr<const PackedLease> file{}; // where they are looked up; may be null
  std::shared_ptr<PackedPages> pages{}; // in which they change; may be null
  std::shared_ptr<PackedCopy> copy{}; // by which they follow a shared working copy; may be null
  std::string path{}; // empty for none

  PackedPages* changing() const { return kPackedStores ? pages.get() : nullptr; }
};

/// What all initializations of one delegate have in common.
struct InnerSetup {
  et::BackendInterface* backend = nullptr;
  DelegatePayload payload;
  std::vector<uint8_t> bytes; // the inner payload
  std::string method;
  std::vector<et::CompileSpec> specs; // they point into the program
  std::vector<et::BackendOption> options; // without `packed_cache_path`
  std::string own_path; // the application's `packed_cache_path`
  PackedPlace packed;
  bool writes_packed = false; // whether commits write entries of `packed.pages`
  // Whether weights that are as in their file are named by their contents, so that the names are the same in every
  // process.
  bool named_by_content = false;
  // Guarded by the lock of InnerHandle. The delegate is destroyed, and perhaps with it what `specs` point into.
  mutable bool retired = false;
};

// Options of XNNPACK. @param path empty for none.
et::BackendOption packed_path_option(const std::string& path);
et::BackendOption weight_cache_option();

/// @throws Failure: the payload is damaged, or the backend is missing.
std::shared_ptr<InnerSetup> make_setup(
    et::BackendInitContext& context, const et::FreeableBuffer& processed, et::ArrayRef<et::CompileSpec> specs);

} // namespace blobstore::internal
