#include <blobstore/mezo.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <executorch/extension/tensor/tensor_ptr.h>

#include <blobstore/error.h>
#include <blobstore/tensors.h>

#include "logical/cache_tensors.h"
#include "os/text.h"
#include "training/optimizer_state.h"

namespace blobstore BLOBSTORE_API {
namespace {

using executorch::aten::ScalarType;
using executorch::extension::TensorPtr;
using namespace internal;

constexpr char kMeZO[] = "MeZO";

/// Random bits by position: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
uint64_t mixed(uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

/// The direction of a tensor in a step: numbers of the normal distribution, by the method of Box and Muller.
class Direction {
 public:
  Direction(uint64_t seed, uint64_t step, const std::string& name) : key_(mixed(seed) ^ step) {
    for (const char letter : name) {
      key_ = mixed(key_ ^ static_cast<uint8_t>(letter));
    }
  }

  /// Call a function with each of the first numbers, in order.
  template <typename Function>
  void each(size_t count, const Function& function) const {
    for (size_t i = 0; i < count; i += 2) {
      const uint64_t bits = mixed(key_ ^ mixed(i));
      const double radius = std::sqrt(-2 * std::log1p((static_cast<double>(bits >> 32) + 0.5) * kUnit - 1));
      const double angle = kTurn * (static_cast<double>(bits & 0xffffffff) + 0.5) * kUnit;
      function(i, static_cast<float>(radius * std::cos(angle)));
      if (i + 1 < count) {
        function(i + 1, static_cast<float>(radius * std::sin(angle)));
      }
    }
  }

 private:
  static constexpr double kUnit = 1.0 / 4294967296.0;
  static constexpr double kTurn = 6.283185307179586;
  uint64_t key_;
};

void check(const MeZOOptions& options) {
  check_option(kMeZO, "lr", options.lr);
  check_option(kMeZO, "eps", options.eps);
  if (options.eps == 0) {
    throw_error(ErrorKind::Training, "{}: eps must not be 0", kMeZO);
  }
}

constexpr auto kFloat = static_cast<int8_t>(ScalarType::Float);

/// The name and the aliases of a tensor; one that is stored as it is has one of them as its key.
std::vector<std::string> names_of(const LogicalTensor& tensor) {
  std::vector<std::string> names = tensor.aliases;
  names.push_back(tensor.name);
  return names;
}

/// Why a tensor of the model cannot be trained; empty if it can.
std::string refusal(const BlobCache& cache, const LogicalTensor& tensor) {
  if (tensor.scalar_type != kFloat) {
    return "is not float32";
  }
  const auto owned = [&](const std::string& key) { return cache.owns(key); };
  const std::vector<std::string> names = names_of(tensor);
  if (tensor.keys.empty() ? std::none_of(names.begin(), names.end(), owned)
                          : !std::all_of(tensor.keys.begin(), tensor.keys.end(), owned)) {
    return "is in the base of the cache";
  }
  return tensor.refusal.empty() ? "" : format("cannot be changed: {}", tensor.refusal);
}

/// The same for a blob that no record describes, as programs without a delegate take it.
std::string refusal(const BlobCache& cache, const Blob& blob) {
  if (!blob.layout || blob.layout->scalar_type != kFloat) {
    return "is not float32";
  }
  return cache.owns(blob.key) ? "" : "is in the base of the cache";
}

} // namespace

struct MeZO::Impl {
  Impl(std::shared_ptr<BlobCache> cache, const MeZOOptions& given) : tensors(std::move(cache)), options(given) {}

  /// Everything in the cache's own files that can be trained.
  std::vector<std::string> all() const {
    const BlobCache& cache = *tensors.cache();
    std::vector<std::string> all;
    std::set<std::string> described;
    for (const std::string& name : tensors.names()) {
      const LogicalTensor tensor = tensors.at(name);
      described.insert(tensor.keys.begin(), tensor.keys.end());
      const std::vector<std::string> names = names_of(tensor);
      described.insert(names.begin(), names.end());
      if (!tensor.auxiliary && refusal(cache, tensor).empty()) {
        all.push_back(name);
      }
    }
    for (size_t i = 0; i < cache.size(); ++i) {
      const Blob& blob = cache.blob(i);
      if (described.count(blob.key) == 0 && refusal(cache, blob).empty()) {
        all.push_back(blob.key);
      }
    }
    return all;
  }

  /// The name of a tensor that was asked for by its name, an alias or its key. @throws Error: it cannot be trained.
  std::string chosen(const std::string& asked) const {
    const BlobCache& cache = *tensors.cache();
    std::string name = asked;
    std::string reason;
    if (tensors.contains(asked)) {
      const LogicalTensor tensor = tensors.at(asked);
      name = tensor.name;
      reason = refusal(cache, tensor);
    } else {
      reason = refusal(cache, cache.at(asked));
    }
    if (!reason.empty()) {
      throw_error(ErrorKind::Unsupported, "{}: '{}' {}, so MeZO cannot train it", cache.name(), asked, reason);
    }
    return name;
  }

  /// Commit the tensors of a step, moved along the direction; one by one, so that only one is there twice.
  void commit(const StateDict& original, double distance) const {
    const auto by = static_cast<float>(distance);
    for (const auto& [name, tensor] : original) {
      TensorPtr moved = executorch::extension::clone_tensor_ptr(*tensor);
      auto* numbers = moved->mutable_data_ptr<float>();
      Direction(options.seed, steps, name).each(static_cast<size_t>(moved->numel()), [&](size_t i, float z) {
        numbers[i] = std::fma(by, z, numbers[i]);
      });
      tensors.update({{name, std::move(moved)}});
    }
  }

  /// @throws Error Training: no program that serves takes one of the tensors, so no step would change a loss.
  void check_taken() {
    const Names all(names.begin(), names.end());
    if (!is_taken && TensorsAccess::of(tensors).without_takers(all).size() == all.size()) {
      throw_error(
          ErrorKind::Training, "{}: no program that is loaded takes {} from it", tensors.cache()->name(), some(all));
    }
    is_taken = true;
  }

  LogicalTensors tensors;
  MeZOOptions options;
  std::vector<std::string> names;
  uint64_t steps = 0;
  bool is_taken = false;
};

MeZO::MeZO(std::shared_ptr<BlobCache> cache, const MeZOOptions& options, const std::vector<std::string>& names) {
  check(options);
  impl_ = std::make_unique<Impl>(std::move(cache), options);
  for (const std::string& name : names) {
    impl_->names.push_back(impl_->chosen(name));
  }
  if (names.empty()) {
    impl_->names = impl_->all();
  }
  std::sort(impl_->names.begin(), impl_->names.end());
  impl_->names.erase(std::unique(impl_->names.begin(), impl_->names.end()), impl_->names.end());
  for (const std::string& name : impl_->names) {
    (void)impl_->tensors.value(name); // throws if its blob does not have it
  }
  if (impl_->names.empty()) {
    throw_error(
        ErrorKind::Training,
        "{}: has no float32 tensor of its own that MeZO could train",
        impl_->tensors.cache()->name());
  }
}

MeZO::~MeZO() = default;

const MeZOOptions& MeZO::options() const {
  return impl_->options;
}

void MeZO::set_options(const MeZOOptions& options) {
  check(options);
  impl_->options = options;
}

const std::vector<std::string>& MeZO::names() const {
  return impl_->names;
}

uint64_t MeZO::steps() const {
  return impl_->steps;
}

void MeZO::set_steps(uint64_t steps) {
  impl_->steps = steps;
}

double MeZO::step(const std::function<double()>& loss) {
  impl_->check_taken();
  StateDict original;
  for (const std::string& name : impl_->names) {
    original[name] = impl_->tensors.value(name);
  }
  const double eps = impl_->options.eps;
  double forth = 0;
  double back = 0;
  try {
    impl_->commit(original, eps);
    forth = loss();
    impl_->commit(original, -eps);
    back = loss();
    if (!std::isfinite(forth) || !std::isfinite(back)) {
      throw_error(
          ErrorKind::NotFiniteLoss,
          "{}: the loss is {}; nothing was changed",
          impl_->tensors.cache()->name(),
          std::to_string(std::isfinite(forth) ? back : forth));
    }
    impl_->commit(original, -impl_->options.lr * ((forth - back) / (2 * eps)));
  } catch (...) {
    impl_->tensors.update(original);
    throw;
  }
  ++impl_->steps;
  return (forth + back) / 2;
}

} // namespace blobstore
