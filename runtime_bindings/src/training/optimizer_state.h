// The state of an optimizer by the names of the parameters, as checkpoints have it: that of torch.optim.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

#include <blobstore/error.h>
#include <blobstore/layout.h>

#include "training/arithmetic.h"
#include "training/plain_value.h"

namespace blobstore::internal {

using NamedTensors = std::vector<std::pair<std::string, executorch::extension::TensorPtr>>;

struct OptimizerState {
  struct Group {
    PlainValue options; // a Dict
    std::vector<std::string> parameters;
  };

  std::string kind; // the name of its class in torch.optim
  std::vector<Group> groups;
  std::vector<std::pair<std::string, PlainValue>> state; // by the parameter's name; each a Dict
};

/// How a tensor lies in memory. One that lies in the order of its dimensions, but for those of size 1, has that order;
/// in any other, dimensions of one stride follow each other by number.
Layout saved_layout(const executorch::aten::Tensor& tensor);

/// A state that an optimizer of this library is to continue from. Every function throws an Error Checkpoint if the
/// state does not fit.
class RestoredState {
 public:
  /// @param kind of the optimizer. @param parameters all that it steps, in one group.
  RestoredState(const OptimizerState& saved, const char* kind, const NamedTensors& parameters, const std::string& path);

  const PlainValue& options() const { return saved_.groups[0].options; }
  double number(const char* option) const;
  std::pair<double, double> numbers(const char* option) const;
  /// @param otherwise if the state does not have the option.
  bool flag(const char* option, bool otherwise) const;

  /// The state of a parameter; null if it has none yet.
  const PlainValue* of(const std::string& parameter) const;
  /// A copy of a tensor of that state, which has the layout of the parameter; empty if it is missing or None.
  std::vector<uint8_t> memory(
      const PlainValue& state, const char* key, const NamedTensors::value_type& parameter) const;
  /// The count of steps in a state.
  float steps(const PlainValue& state, const std::string& parameter) const;
  /// Check that a state has nothing else than these keys.
  void check_keys(const PlainValue& state, const std::string& parameter, const std::vector<const char*>& known) const;
  /// Call what throws an Error if the options are impossible.
  template <typename Check>
  void accept(const Check& check) const {
    try {
      check();
    } catch (const Error& error) {
      refuse(error.reason());
    }
  }
  [[noreturn]] void refuse(const std::string& reason) const;

 private:
  const OptimizerState& saved_;
  const char* kind_;
  const std::string& path_;
};

/// What an optimizer of this library keeps for its parameters, by their names.
class OptimizerMemory {
 public:
  /// What is kept for one parameter.
  struct Kept {
    float steps = 0; // as torch counts them; 1 after the first one if they are not counted
    std::vector<std::vector<uint8_t>> tensors; // by the order of the keys; as many bytes as the parameter
  };
  using Parts = std::vector<std::pair<Numbers, Kept*>>;

  /// @param kind the class of the optimizer in torch.optim. @param keys what torch calls the tensors. @param counts
  ///   whether the state of a parameter has the number of its steps.
  OptimizerMemory(const char* kind, bool counts, std::vector<const char*> keys)
      : kind_(kind), counts_(counts), keys_(std::move(keys)) {}

  /// Whether nothing is kept yet.
  bool empty() const { return kept_.empty(); }
  /// What a step changes. A parameter that had none yet gets tensors of zeros.
  ///
  /// @param tensors how many are kept for each parameter; if it is 0, the second of each part is null.
  /// @throws Error Training: a parameter does not fit. Nothing was changed.
  Parts prepare(const StateDict& parameters, const StateDict& gradients, size_t tensors);
  /// A copy of everything, with the options that were restored.
  OptimizerState capture(const NamedTensors& parameters) const;
  /// Make an empty one from a saved state. @param tensors how many are taken for each parameter.
  void restore(const RestoredState& from, const NamedTensors& parameters, size_t tensors);

 private:
  const char* kind_;
  bool counts_;
  std::vector<const char*> keys_;
  std::map<std::string, Kept> kept_;
  PlainValue options_ = PlainValue::dict(); // as they were restored
};

/// Set an option, unless the group has a number, or a pair of numbers, that is equal, such as 1 for 1.0.
void set_option(PlainValue& options, const char* name, PlainValue value);

/// Check that an option is a finite number that is not negative. @throws Error Training.
void check_option(const char* kind, const char* name, double number);
} // namespace blobstore::internal
