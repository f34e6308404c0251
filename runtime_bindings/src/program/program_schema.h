// What this library knows of schema/program.fbs: the numbers of fields, and how a tensor is described.
#pragma once

#include <cstdint>
#include <optional>

#include <blobstore/layout.h>

#include "format/flatbuffer.h"

namespace blobstore::internal {

constexpr size_t kProgramSizeAt = 16; // in the extended header, behind the file identifier

// Numbers of fields in schema/program.fbs.
enum ProgramField {
  kPlans = 1,
  kConstantBuffer = 2,
  kInlinePayloads = 3,
  kSegments = 4,
  kConstantSegment = 5,
  kNamedData = 7,
};
enum PlanField { kName = 0, kValues = 2, kInputs = 3, kOperators = 6, kDelegates = 7 };
enum AllocationField { kMemoryId = 0, kOffsetLow = 1, kOffsetHigh = 2 };
enum ValueField { kValueType = 0, kValue = 1 };
enum TensorField {
  kScalarType = 0,
  kStorageOffset = 1,
  kSizes = 2,
  kDimOrder = 3,
  kRequiresGrad = 4,
  kDataBuffer = 5,
  kAllocation = 6,
  kLayoutField = 7,
  kDynamism = 8,
  kExtra = 9,
  kTensorFields = 10,
};
enum ExtraField { kFqn = 1, kLocation = 2, kDeviceType = 3, kDeviceIndex = 4, kExtraFields = 5 };

constexpr uint8_t kTensorType = 5; // of the union KernelTypes
constexpr uint8_t kExternal = 1; // of TensorDataLocation

/// Scalar type, sizes and dim order of a Tensor; empty if a later ExecuTorch defines its type.
/// @throws FormatError: the layout is impossible.
std::optional<Layout> tensor_layout(const FlatBuffer& buffer, uint64_t tensor);

/// Whether a Tensor has a layout; does not build a Layout of it, because there may be many tensors.
bool has_layout(const FlatBuffer& buffer, uint64_t tensor, const std::optional<Layout>& layout);

} // namespace blobstore::internal
