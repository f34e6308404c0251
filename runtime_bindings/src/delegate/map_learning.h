// Learning how XNNPACK packs, while a file is built.
#pragma once

#include <memory>
#include <vector>

#include "delegate/inner_handle.h"
#include "delegate/packed_units.h"
#include "packed/load_plan.h"

namespace blobstore::internal {

/// Find a map for each kind of weight of a delegate that was packed to `plan.own.scratch`, and prove it for each
/// weight: applied to the stored bytes it must give the packed ones. What is found goes to the result.
///
/// Packs numbers, by initializing the inner backend a few more times. Weights of one kind are packed once each time.
/// @param names and @param constants are parallel to the constants of the payload. @param weights numbers of constants.
void learn_maps(
    const LoadPlan& plan,
    LoadResult& result,
    const std::shared_ptr<const InnerSetup>& setup,
    const BlobNames& names,
    const std::vector<InnerConstant>& constants,
    const std::vector<size_t>& weights);

} // namespace blobstore::internal
