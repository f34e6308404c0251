// Training without gradients: an adapter on a cache is moved a little forth and back, and then against the difference
// of the two losses. So a program that only serves can learn, quantized and delegated as it is.
//
//   auto program = blobstore::Program::load("loss.pte", cache);
//   blobstore::MeZO optimizer(cache, {1e-4, 1e-3}); // learning rate, distance
//   optimizer.step([&] {
//     const auto outputs = program->forward(tokens);
//     return static_cast<double>(outputs[0].toTensor().const_data_ptr<float>()[0]);
//   });
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/export.h>

namespace blobstore BLOBSTORE_API {

struct MeZOOptions {
  double lr = 1e-6;
  double eps = 1e-3; // how far the tensors are moved, in both directions
  uint64_t seed = 0; // of the directions
};

/// Zeroth-order descent as in MeZO (Malladi et al., 2023, arXiv:2305.17333, algorithm 1), on the tensors of a cache. A
/// step chooses a direction z, whose numbers have the normal distribution, runs `loss` at w + eps z and at w - eps z,
/// and commits w - lr (difference of the losses / 2 eps) z.
///
/// A step commits each tensor three times, so give it a cache that nobody else serves from: one on the same foundation
/// with the same adapter. Memory: a copy of the tensors that are trained, during a step.
///
/// Directions depend on nothing but the seed, the number of the step, and the names, and are equal in all languages.
/// Only one thread at a time may use an optimizer. Holds the cache.
class MeZO final {
 public:
  /// @param names the tensors to train, float32. If there are none: all of them in the cache's own files, without those
  ///   of its base.
  /// @throws Error Training: the options are impossible, or there is nothing to train. KeyNotFound. Unsupported: a
  ///   tensor has another dtype, is in the base, or cannot be changed. Update: its blob does not contain it, because it
  ///   was quantized, packed or combined.
  explicit MeZO(
      std::shared_ptr<BlobCache> cache,
      const MeZOOptions& options = MeZOOptions(),
      const std::vector<std::string>& names = {});
  ~MeZO();
  MeZO(const MeZO&) = delete;
  MeZO& operator=(const MeZO&) = delete;

  const MeZOOptions& options() const;
  /// Change the options, such as the learning rate, from the next step on. @throws Error Training, as the constructor.
  void set_options(const MeZOOptions& options);
  /// The names of the tensors that are trained, sorted.
  const std::vector<std::string>& names() const;
  /// How many steps were made. To go on with an adapter that was saved, set what it was then.
  uint64_t steps() const;
  void set_steps(uint64_t steps);

  /// Make one step. `loss` is called twice and should compute the same each time; it must not hold a Reading.
  ///
  /// @returns the mean of the two losses.
  /// @throws Error NotFiniteLoss; Training: no loaded program that serves takes one of the tensors; what `loss` and
  /// `LogicalTensors::update` throw. The tensors are as before the step.
  double step(const std::function<double()>& loss);

 private:
  struct BLOBSTORE_HIDDEN Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace blobstore
