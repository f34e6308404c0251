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
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/runtime/core/evalue.h>

#include <blobstore/cache.h>
#include <blobstore/export.h>
#include <blobstore/program.h>
#include <blobstore/tensors.h>

namespace blobstore BLOBSTORE_API {

namespace internal BLOBSTORE_HIDDEN {
class OptimizerMemory;
struct OptimizerState;
struct TrainingAccess;
} // namespace internal BLOBSTORE_HIDDEN

/// Changes parameters by their gradients. A `TrainingProgram` calls it. The state of an optimizer of your own is not in
/// checkpoints.
class Optimizer {
 public:
  virtual ~Optimizer();
  /// Each parameter has a gradient of its shape, dtype and strides under the same name. Changes the memory of the
  /// parameters. If it throws, parameters that it changed stay changed.
  virtual void step(const StateDict& parameters, const StateDict& gradients) = 0;

 protected:
  using NamedTensors = std::vector<std::pair<std::string, executorch::extension::TensorPtr>>;

 private:
  friend class TrainingProgram;
  /// A copy of the state for these parameters. @throws Error Unsupported: it gives no access to its state.
  virtual internal::OptimizerState capture(const NamedTensors& parameters) const;
  /// Continue from a saved state. @throws Error Checkpoint: it does not fit. Unsupported. Nothing was changed.
  virtual void restore(const internal::OptimizerState& saved, const NamedTensors& parameters, const std::string& path);
};

/// The options of ExecuTorch's and of PyTorch's SGD.
struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false; // needs momentum, and no dampening
  bool maximize = false;
};

/// Stochastic gradient descent as in torch.optim.SGD, for float and double: steps are equal to the bit to those that
/// torch makes on a processor with AVX2. Keeps the momentum of each parameter by its name. Only one thread at a time
/// may use it.
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
  internal::OptimizerState capture(const NamedTensors& parameters) const override;
  BLOBSTORE_HIDDEN void restore(
      const internal::OptimizerState& saved, const NamedTensors& parameters, const std::string& path) override;

  SGDOptions options_;
  std::unique_ptr<internal::OptimizerMemory> memory_;
};

/// The options of PyTorch's AdamW.
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
};

/// Adam with decoupled weight decay as in torch.optim.AdamW, for float and double. The steps are those of
/// blobstore.training.AdamW in Python, to the bit. torch.optim.AdamW takes square roots that are not always rounded
/// correctly, so its parameters can differ in the last bits. Keeps two running averages of each parameter by its name,
/// three with `amsgrad`. Only one thread at a time may use it.
class AdamW final : public Optimizer {
 public:
  /// @throws Error Training: the options are impossible.
  explicit AdamW(const AdamWOptions& options = AdamWOptions());
  ~AdamW() override;
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  const AdamWOptions& options() const { return options_; }
  /// Change the options, such as the learning rate, from the next step on. @throws Error Training, as the constructor;
  ///   `amsgrad` changed after a step.
  void set_options(const AdamWOptions& options);
  /// @throws Error Training, as `SGD::step`. Nothing was changed.
  void step(const StateDict& parameters, const StateDict& gradients) override;

 private:
  internal::OptimizerState capture(const NamedTensors& parameters) const override;
  BLOBSTORE_HIDDEN void restore(
      const internal::OptimizerState& saved, const NamedTensors& parameters, const std::string& path) override;

  AdamWOptions options_;
  std::unique_ptr<internal::OptimizerMemory> memory_;
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
/// A checkpoint is a `.ptd` with parameters and buffers under their names, and the state of an optimizer. Python's
/// blobstore.training writes and reads the same files. A run that continues from one, in either language, computes what
/// the run that saved it computes, to the bit.
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

  /// Write a checkpoint. Its contents are from one moment between two steps; these wait while the contents are copied,
  /// but not while they are written. An existing file is replaced when the new one is complete.
  ///
  /// @param optimizer whose state to save, if any: an SGD or an AdamW. No other thread may change its options
  /// meanwhile.
  /// @param base `.ptd` files. Tensors that they have with the same bytes are not written again. If several have a key,
  ///   the last one counts.
  /// @param metadata text to keep with the file.
  /// @returns the size of the file in bytes.
  /// @throws Error OutputPath: the path is that of the program, a base, or a file that the cache maps. Unsupported: the
  ///   optimizer is of another class, or `nameless` is not 0, so that a run could not continue from the checkpoint.
  ///   FileAccess, InvalidFile, Integrity: a base cannot be read, or writing failed. An existing file is unchanged.
  uint64_t save(
      const std::string& path,
      const Optimizer* optimizer = nullptr,
      const std::vector<std::string>& base = {},
      const std::map<std::string, std::string>& metadata = {});
  /// Continue from a checkpoint: restore the parameters, the buffers and, if it is given, the optimizer with its
  /// options.
  ///
  /// @param optimizer of the class that was saved, with the same parameters in one group.
  /// @param base the same base as for `save`.
  /// @throws Error FileAccess, InvalidFile, Integrity: a file cannot be opened or trusted, or is not a checkpoint.
  ///   Checkpoint: it is of another model, of other frozen weights (as far as these are in data files), or of another
  ///   optimizer; or its base is missing or different. Unsupported, as `save`. Nothing was changed.
  void load(const std::string& path, Optimizer* optimizer = nullptr, const std::vector<std::string>& base = {});

  /// Commit the trained parameters and buffers to the programs on a cache, all or none. Their next call uses them. The
  /// values are from one moment between two steps; steps of other threads wait until the commit is done. Blocks as
  /// `BlobCache::update` does.
  ///
  /// Buffers that the cache lacks, and those that its programs change themselves, are ignored. Where a delegate has
  /// combined a trained tensor with a frozen one, the frozen one is read from this program's data files.
  ///
  /// @param strict refuse if the cache lacks parameters, if it has some under names that no program takes which serves,
  ///   or if a program that is loaded on it seems to have some where no update reaches them. Otherwise such parameters
  ///   are ignored. Refuse also what a strict `LogicalTensors::update_state_dict` refuses to clip.
  /// @param finite refuse infinities and NaN.
  /// @returns the cache's new generation, and how many numbers of which tensors were clipped.
  /// @throws Error KeyNotFound: the cache lacks parameters; the message names all of them. Update: it has none of the
  ///   parameters and buffers, nothing that serves takes them, or some are out of reach. As `LogicalTensors::update`.
  ///   Nothing was changed.
  Updated publish(const LogicalTensors& target, bool strict = true, bool finite = false);
  /// As above; reads the records of the cache first.
  Updated publish(const std::shared_ptr<BlobCache>& target, bool strict = true, bool finite = false);

 private:
  friend struct internal::TrainingAccess;
  struct BLOBSTORE_HIDDEN Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace blobstore
