// The scales that an update quantizes with: those that it gives, those that follow from the new weights, or those that
// are stored.
//
// Where the scales of channels and groups are a blob of their own, they are computed from the new numbers, as torch and
// torchao do for symmetric quantization: the largest magnitude of a channel becomes the end of the integers' range.
// torchao quantizes with scales in float32 also where bfloat16 is stored, and so does an update. Weights that give the
// stored integers with the stored scales keep both, whichever way these were found. So an update of a model with its
// own weights changes no bit.
//
// Scales of a whole tensor and those of activations are numbers in the payload of a delegate, and stay. The integers of
// a bias count products of the two, so they follow their weight.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "format/tensor_view.h"
#include "logical/index.h"
#include "logical/steps.h"

namespace blobstore::internal {

/// The scales of one update.
class Scales {
 public:
  /// @param stored returns the bytes of a blob as it is now.
  Scales(const Index& index, Lookup stored) : index_(index), read_(std::move(stored)) {}

  /// Scales that the update gives.
  void give(const std::string& key, const TensorView& bytes) { given_[key] = bytes; }
  /// The scales under a key after the update; of type float32 if they were computed.
  TensorView find(const std::string& key) const;
  /// Those that are stored now.
  const TensorView& stored(const std::string& key) const;
  /// Choose the scales that a step is about to quantize numbers with.
  /// @param can_change whether they may be computed anew.
  /// @param packed the stored numbers of four bits, in rows; empty for others.
  /// @returns whether they were computed.
  bool choose(const Step& step, const TensorView& numbers, bool can_change, const TensorView& packed);
  /// Take the scales of a step as they are stored, after all.
  void keep(const Step& step);
  /// How many scales of a step differ from those that are stored.
  uint64_t changed(const Step& step) const;
  /// Compute the scales of the biases beside weights whose scales change, if `choose` was not called for them.
  /// @returns the records of these biases.
  std::vector<const Record*> follow();

  /// New scales that were not given.
  struct Computed {
    std::string key;
    std::vector<float> exact; // that numbers are quantized with
    TensorView bytes; // as they are stored
    uint64_t changed = 0; // how many of them differ from those that were stored
  };
  const std::vector<Computed>& computed() const { return computed_; }

 private:
  const Computed* computed(std::string_view key) const;
  std::vector<float> as_stored(const Step& step) const;
  void compute(const Step& step, std::vector<float> exact);
  void multiply(const Step& step, const Record& product);
  bool is_new(std::string_view key) const;

  const Index& index_;
  Lookup read_;
  mutable std::map<std::string, TensorView> stored_;
  std::map<std::string, TensorView, std::less<>> given_;
  std::vector<Computed> computed_;
};

/// How many numbers lie outside of what a step can express, so that it limits them; those that are not finite count.
uint64_t beyond(const Step& step, const TensorView& numbers, const Lookup& lookup);

/// The integers of a bias with other scales. @param integers of four bytes, one for each scale.
TensorView rescale(const TensorView& integers, const std::vector<float>& before, const std::vector<float>& after);

} // namespace blobstore::internal
