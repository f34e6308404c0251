// The state of an optimizer by the names of the parameters, as checkpoints have it: that of torch.optim.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

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
  void check_keys(
      const PlainValue& state, const std::string& parameter, std::initializer_list<std::string_view> known) const;
  [[noreturn]] void refuse(const std::string& reason) const;

 private:
  const OptimizerState& saved_;
  const char* kind_;
  const std::string& path_;
};

/// A state with one group of all parameters, and no options yet.
OptimizerState one_group(const char* kind, const NamedTensors& parameters);
/// Set an option, unless the group has a number, or a pair of numbers, that is equal, such as 1 for 1.0.
void set_option(PlainValue& options, const char* name, PlainValue value);
/// As many bytes as a parameter has, as a tensor of its layout.
PlainValue tensor_like(const executorch::aten::Tensor& parameter, const std::vector<uint8_t>& bytes);

/// Check that an option is a finite number that is not negative. @throws Error Training.
void check_option(const char* kind, const char* name, double number);
/// The numbers of a parameter and its gradient. @throws Error Training: they do not fit, or are neither float nor
/// double.
Numbers numbers_of(
    const char* kind, const std::string& name, const executorch::aten::Tensor& parameter, const StateDict& gradients);

} // namespace blobstore::internal
