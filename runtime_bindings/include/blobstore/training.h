// Training on the device: a method of a program computes a loss and its gradients, an optimizer steps, and a cache
// serves the result.
//
//   blobstore::TrainingProgram training(blobstore::Program::load("train.pte", cache));
//   blobstore::SGD optimizer({0.1, 0.9}); // learning rate, momentum
//   training.step(optimizer, {make_tensor_ptr({4, 2}, inputs), make_tensor_ptr({4}, labels)});
//   training.publish(serving_cache);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <executorch/runtime/core/evalue.h>

#include <blobstore/cache.h>
#include <blobstore/export.h>
#include <blobstore/program.h>
#include <blobstore/tensors.h>

namespace blobstore BLOBSTORE_API {

namespace internal BLOBSTORE_HIDDEN {
struct TrainingAccess;
} // namespace internal BLOBSTORE_HIDDEN

/// Changes parameters by their gradients. A `TrainingProgram` calls it.
class Optimizer {
 public:
  virtual ~Optimizer();
  /// Each parameter has a gradient of its shape, dtype and strides under the same name. Changes the memory of the
  /// parameters. If it throws, parameters that it changed stay changed.
  virtual void step(const StateDict& parameters, const StateDict& gradients) = 0;
};

/// The options of ExecuTorch's and of PyTorch's SGD.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false; // needs momentum, and no dampening
};

/// Stochastic gradient descent as in torch.optim.SGD, for float and double. Keeps the momentum of each parameter by its
/// name. Only one thread at a time may use it.
class SGD final : public Optimizer {
 public:
  /// @throws Error Training: the options are impossible.
  explicit SGD(const SGDOptions& options);
  ~SGD() override;
  SGD(const SGD&) = delete;
  SGD& operator=(const SGD&) = delete;

  const SGDOptions& options() const { return options_; }
  /// Change the options, such as the learning rate, from the next step on. @throws Error Training, as the constructor.
  void set_options(const SGDOptions& options);
  /// @throws Error Training: a parameter has another dtype, or another shape than in the steps before. Nothing was
  ///   changed.
  void step(const StateDict& parameters, const StateDict& gradients) override;

 private:
  struct Momentum;

  SGDOptions options_;
  std::unique_ptr<Momentum> momentum_;
};

/// What a step does if the loss is infinite or NaN.
enum class OnNan {
  Throw, // throws an error
  Skip, // returns the outputs; in both cases parameters, buffers and optimizer are unchanged
  Accept, // steps as usual
};

/// A method that computes a loss and its gradients, as ExecuTorch's `_export_forward_backward` exports it. Holds the
/// program and its cache.
///
/// The parameters are embedded in the program or, if it was exported with `external_mutable_weights`, in the data files
/// of the cache. In both cases the program trains its own copy: neither the cache nor other programs on it see a step
/// before `publish`. Frozen external weights are read from the memory of the cache.
///
/// Threads: any thread may call any function at any time. Those that read or change the parameters take turns, so each
/// blocks while another thread is in one. `lock` takes a turn for code of your own. Do not take a turn while the thread
/// holds a Reading, because `publish` waits for Readings. After a fork the child has its own copy. If another thread
/// had the turn at the fork, taking one in the child throws an Error Training.
///
/// Checkpoints with the state of an optimizer are files of blobstore.training in Python. Here, save the cache after
/// `publish` instead.
class TrainingProgram {
 public:
  /// @throws Error Program: the method is not a training program. Unsupported: gradients or parameters have no planned
  ///   memory. As `Program::load_method`.
  explicit TrainingProgram(std::shared_ptr<Program> program, const std::string& method = "forward");
  ~TrainingProgram();
  TrainingProgram(const TrainingProgram&) = delete;
  TrainingProgram& operator=(const TrainingProgram&) = delete;

  const std::shared_ptr<Program>& program() const;
  const std::shared_ptr<Method>& method() const;
  /// The names of the trained parameters, in the order of the program.
  const std::vector<std::string>& names() const;
  /// The number of outputs of the model, the loss first. Those behind them are gradients and parameters.
  size_t outputs() const;
  /// The number of buffers that the program changes and that have no names. They cannot be reached: they are neither
  /// published nor restored after a failed step.
  size_t nameless() const;

  /// The trained parameters by name, over the memory that the program reads. They may be written to, also before the
  /// first step; take a turn if other threads train. They keep the memory alive.
  const StateDict& named_parameters() const;
  /// The gradients by name, with the same rules: zero before the first step, overwritten by each step.
  const StateDict& named_gradients() const;
  /// The buffers that the program changes itself, such as running statistics, with the same rules. A program has their
  /// names only if it was lowered with `emit_mutable_buffer_names`.
  const StateDict& named_buffers() const;

  /// Run the method. Afterwards the gradients are those of the loss for these inputs.
  ///
  /// @param in_place as in `RunOptions`.
  /// @returns the outputs of the model, the loss first.
  /// @throws as `Method::execute`. Parameters and buffers are unchanged.
  Outputs forward_backward(
      const std::vector<executorch::runtime::EValue>& inputs, const std::vector<bool>& in_place = {});
  /// Call `forward_backward` and step the optimizer, in one turn.
  ///
  /// @throws Error NotFiniteLoss, as `on_nan` says; as `forward_backward`; what the optimizer throws: then the buffers
  ///   are restored, but parameters that it had already changed stay changed.
  Outputs step(
      Optimizer& optimizer,
      const std::vector<executorch::runtime::EValue>& inputs,
      OnNan on_nan = OnNan::Throw,
      const std::vector<bool>& in_place = {});

  /// Take a turn, for std::lock_guard and the like. The thread that has it may take it again and call every function.
  /// Blocks while another thread has it. @throws Error Training: see above.
  void lock();
  void unlock();

  /// Commit the trained parameters and buffers to the programs on a cache, all or none. Their next call uses them. The
  /// values are from one moment between two steps; steps of other threads wait until the commit is done. Blocks as
  /// `BlobCache::update` does.
  ///
  /// Buffers that the cache lacks, and those that its programs change themselves, are ignored. Where a delegate has
  /// combined a trained tensor with a frozen one, the frozen one is read from this program's data files.
  ///
  /// @param strict refuse if the cache lacks parameters, or if a program that is loaded on it seems to have some where
  ///   no update reaches them. Otherwise such parameters are ignored.
  /// @param finite refuse infinities and NaN.
  /// @returns the cache's new generation.
  /// @throws Error KeyNotFound: the cache lacks parameters; the message names all of them. Update: it has none of the
  ///   parameters and buffers, or some are out of reach. As `LogicalTensors::update`. Nothing was changed.
  uint64_t publish(const LogicalTensors& target, bool strict = true, bool finite = false);
  /// As above; reads the records of the cache first.
  uint64_t publish(const std::shared_ptr<BlobCache>& target, bool strict = true, bool finite = false);

 private:
  friend struct internal::TrainingAccess;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace blobstore
