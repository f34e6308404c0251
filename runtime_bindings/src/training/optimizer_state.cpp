#include "training/optimizer_state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>
#include <tuple>

#include <blobstore/error.h>

#include "logical/dim_order.h"
#include "os/text.h"

namespace blobstore::internal {

using executorch::aten::ScalarType;

Layout saved_layout(const executorch::aten::Tensor& tensor) {
  Layout layout;
  layout.scalar_type = static_cast<int8_t>(tensor.scalar_type());
  layout.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  layout.dim_order = dim_order_of(tensor);
  std::vector<uint8_t> own(layout.dim_order.size());
  std::iota(own.begin(), own.end(), uint8_t{0});
  std::vector<uint8_t> wide; // dimensions of size 1 lie anywhere
  std::copy_if(layout.dim_order.begin(), layout.dim_order.end(), std::back_inserter(wide), [&](uint8_t dim) {
    return layout.sizes[dim] != 1;
  });
  if (tensor.numel() == 0 || std::is_sorted(wide.begin(), wide.end())) {
    layout.dim_order = std::move(own);
    return layout;
  }
  const auto strides = tensor.strides();
  std::sort(own.begin(), own.end(), [&](uint8_t one, uint8_t other) {
    return std::tie(strides[other], one) < std::tie(strides[one], other);
  });
  layout.dim_order = std::move(own);
  return layout;
}

RestoredState::RestoredState(
    const OptimizerState& saved, const char* kind, const NamedTensors& parameters, const std::string& path)
    : saved_(saved), kind_(kind), path_(path) {
  if (saved.kind != kind) {
    refuse(format("the saved state is that of optimizer {}, not of {}", saved.kind, kind));
  }
  std::set<std::string> names;
  for (const auto& [name, tensor] : parameters) {
    names.insert(name);
  }
  const bool one = saved.groups.size() == 1;
  if (!one || std::set<std::string>(saved.groups[0].parameters.begin(), saved.groups[0].parameters.end()) != names) {
    const size_t count = one ? saved.groups[0].parameters.size() : saved.groups.size();
    refuse(format(
        "the {} has one group with the program's {} parameters, the saved one {} {}",
        kind,
        names.size(),
        count,
        one ? "others or only some" : "groups"));
  }
}

double RestoredState::number(const char* option) const {
  const PlainValue* found = options().find(option);
  if (found == nullptr || !found->is_number()) {
    refuse(format("the saved option {} of the {} is not a number", option, kind_));
  }
  return found->as_number();
}

std::pair<double, double> RestoredState::numbers(const char* option) const {
  const PlainValue* found = options().find(option);
  const bool fits = found != nullptr &&
      (found->kind == PlainValue::Kind::Tuple || found->kind == PlainValue::Kind::List) && found->items.size() == 2 &&
      found->items[0].second.is_number() && found->items[1].second.is_number();
  if (!fits) {
    refuse(format("the saved option {} of the {} is not a pair of numbers", option, kind_));
  }
  return {found->items[0].second.as_number(), found->items[1].second.as_number()};
}

bool RestoredState::flag(const char* option, bool otherwise) const {
  const PlainValue* found = options().find(option);
  if (found == nullptr) {
    return otherwise;
  }
  if (found->kind != PlainValue::Kind::Bool) {
    refuse(format("the saved option {} of the {} is neither true nor false", option, kind_));
  }
  return found->number != 0;
}

const PlainValue* RestoredState::of(const std::string& parameter) const {
  for (const auto& [name, state] : saved_.state) {
    if (name == parameter) {
      return state.items.empty() ? nullptr : &state;
    }
  }
  return nullptr;
}

std::vector<uint8_t> RestoredState::memory(
    const PlainValue& state, const char* key, const NamedTensors::value_type& parameter) const {
  const PlainValue* found = state.find(key);
  if (found == nullptr || found->kind == PlainValue::Kind::None) {
    return {};
  }
  const Layout expected = saved_layout(*parameter.second);
  if (found->kind != PlainValue::Kind::Tensor || found->tensor->layout != expected) {
    const std::string is = found->kind == PlainValue::Kind::Tensor ? to_string(found->tensor->layout) : "not a tensor";
    refuse(format("{} of '{}' must be {}, it is {}", key, parameter.first, to_string(expected), is));
  }
  return found->tensor->bytes;
}

float RestoredState::steps(const PlainValue& state, const std::string& parameter) const {
  const PlainValue* found = state.find("step");
  double count = NAN;
  if (found != nullptr && found->is_number()) {
    count = found->as_number();
  } else if (found != nullptr && found->kind == PlainValue::Kind::Tensor && found->tensor->layout.sizes.empty()) {
    const SavedTensor& tensor = *found->tensor;
    if (tensor.layout.scalar_type == static_cast<int8_t>(ScalarType::Double)) {
      std::memcpy(&count, tensor.bytes.data(), sizeof count);
    } else if (tensor.layout.scalar_type == static_cast<int8_t>(ScalarType::Float)) {
      float number = NAN;
      std::memcpy(&number, tensor.bytes.data(), sizeof number);
      count = static_cast<double>(number);
    }
  }
  if (!(count >= 0) || !std::isfinite(count)) {
    refuse(format("step of '{}' is not a number of steps", parameter));
  }
  return static_cast<float>(count);
}

void RestoredState::check_keys(
    const PlainValue& state, const std::string& parameter, const std::vector<const char*>& known) const {
  for (const auto& [key, value] : state.items) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      refuse(format("the saved state of '{}' has {}, which the {} of this library does not", parameter, key, kind_));
    }
  }
}

void RestoredState::refuse(const std::string& reason) const {
  throw_error_in(ErrorKind::Checkpoint, path_, "{}", reason);
}

namespace {

constexpr char kStep[] = "step";

/// @throws Error Training: they do not fit, or are neither float nor double.
Numbers numbers_of(
    const char* kind, const std::string& name, const executorch::aten::Tensor& parameter, const StateDict& gradients) {
  const auto found = gradients.find(name);
  if (found == gradients.end() || found->second->nbytes() != parameter.nbytes()) {
    throw_error(ErrorKind::Training, "{}: parameter '{}' has no gradient of its shape", kind, name);
  }
  const ScalarType type = parameter.scalar_type();
  if (found->second->scalar_type() != type || (type != ScalarType::Float && type != ScalarType::Double)) {
    throw_error(
        ErrorKind::Training, "{}: parameter '{}' and its gradient must both be float, or both double", kind, name);
  }
  return {type, static_cast<size_t>(parameter.numel()), parameter.mutable_data_ptr(), found->second->const_data_ptr()};
}

PlainValue scalar(float number) {
  SavedTensor made;
  made.layout.scalar_type = static_cast<int8_t>(ScalarType::Float);
  made.bytes.resize(sizeof number);
  std::memcpy(made.bytes.data(), &number, sizeof number);
  return PlainValue::of(std::move(made));
}

} // namespace

OptimizerMemory::Parts OptimizerMemory::prepare(
    const StateDict& parameters, const StateDict& gradients, size_t tensors) {
  Parts parts;
  std::map<std::string, Kept> made;
  for (const auto& [name, parameter] : parameters) {
    parts.emplace_back(numbers_of(kind_, name, *parameter, gradients), nullptr);
    if (tensors == 0) {
      continue;
    }
    const auto known = kept_.find(name);
    const bool is_new = known == kept_.end();
    Kept& kept = is_new ? made[name] : known->second;
    if (is_new) {
      kept.tensors.assign(tensors, std::vector<uint8_t>(parameter->nbytes()));
    } else if (kept.tensors[0].size() != parameter->nbytes()) {
      throw_error(ErrorKind::Training, "{}: parameter '{}' had another shape or dtype in an earlier step", kind_, name);
    }
    parts.back().second = &kept;
  }
  kept_.merge(made); // moves the nodes, so the parts stay valid
  return parts;
}

OptimizerState OptimizerMemory::capture(const NamedTensors& parameters) const {
  OptimizerState saved;
  saved.kind = kind_;
  saved.groups.push_back({options_, {}});
  for (const auto& [name, parameter] : parameters) {
    saved.groups[0].parameters.push_back(name);
    const auto known = kept_.find(name);
    if (known == kept_.end()) {
      continue;
    }
    PlainValue& state = saved.state.emplace_back(name, PlainValue::dict()).second;
    if (counts_) {
      state.set(kStep, scalar(known->second.steps));
    }
    for (size_t i = 0; i < known->second.tensors.size(); ++i) {
      state.set(keys_[i], PlainValue::of(SavedTensor{saved_layout(*parameter), known->second.tensors[i]}));
    }
  }
  return saved;
}

void OptimizerMemory::restore(const RestoredState& from, const NamedTensors& parameters, size_t tensors) {
  options_ = from.options();
  std::vector<const char*> known = keys_;
  if (counts_) {
    known.push_back(kStep);
  }
  for (const auto& parameter : parameters) {
    const std::string& name = parameter.first;
    const PlainValue* state = from.of(name);
    if (state == nullptr) {
      continue;
    }
    from.check_keys(*state, name, known);
    Kept kept;
    kept.steps = counts_ ? from.steps(*state, name) : 1; // at least
    for (size_t i = 0; i < tensors; ++i) {
      kept.tensors.push_back(from.memory(*state, keys_[i], parameter));
    }
    const bool is_whole = std::all_of(kept.tensors.begin(), kept.tensors.end(), [&](const auto& one) {
      return one.size() == parameter.second->nbytes();
    });
    if (is_whole) {
      kept_.emplace(name, std::move(kept));
    } else if (counts_) { // otherwise it has made no step
      from.refuse(format("the saved state of '{}' lacks a running average", name));
    }
  }
}

void set_option(PlainValue& options, const char* name, PlainValue value) {
  const PlainValue* old = options.find(name);
  const auto equal = [](const PlainValue& one, const PlainValue& other) {
    return one.is_number() && other.is_number() && std::equal_to<double>()(one.as_number(), other.as_number());
  };
  bool same = old != nullptr && equal(*old, value);
  if (old != nullptr && value.kind == PlainValue::Kind::Tuple && old->items.size() == value.items.size()) {
    same = std::equal(old->items.begin(), old->items.end(), value.items.begin(), [&](const auto& a, const auto& b) {
      return equal(a.second, b.second);
    });
  }
  if (!same) {
    options.set(name, std::move(value));
  }
}

void check_option(const char* kind, const char* name, double number) {
  if (!(number >= 0) || !std::isfinite(number)) {
    throw_error(
        ErrorKind::Training,
        "{}: {} must be a finite number that is not negative, not {}",
        kind,
        name,
        std::to_string(number));
  }
}

} // namespace blobstore::internal
