#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include <blobstore/error.h>
#include <blobstore/reading.h>
#include <blobstore/training.h>

#include "format/digest.h"
#include "logical/similar_names.h"
#include "os/text.h"
#include "training/checkpoint.h"
#include "training/publish.h"
#include "training/signature.h"
#include "training/turns.h"

namespace blobstore BLOBSTORE_API {

namespace et = executorch::runtime;
using executorch::aten::ScalarType;
using executorch::extension::TensorPtr;
using namespace internal;

namespace {

/// Copies of tensors, which go back unless they are dismissed.
class Restore {
 public:
  explicit Restore(const NamedTensors& tensors) : tensors_(tensors) {
    for (const auto& [name, tensor] : tensors) {
      const auto* data = static_cast<const uint8_t*>(tensor->const_data_ptr());
      copies_.emplace_back(data, data + tensor->nbytes());
    }
  }
  ~Restore() {
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (!copies_[i].empty()) {
        std::memcpy(tensors_[i].second->mutable_data_ptr(), copies_[i].data(), copies_[i].size());
      }
    }
  }
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  void dismiss() { copies_.clear(); }

 private:
  const NamedTensors& tensors_;
  std::vector<std::vector<uint8_t>> copies_;
};

bool same_layout(const executorch::aten::Tensor& one, const executorch::aten::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.sizes().equals(other.sizes()) &&
      one.strides().equals(other.strides());
}

template <typename Number>
const Number* find_not_finite(const executorch::aten::Tensor& tensor) {
  const auto* numbers = tensor.const_data_ptr<Number>();
  const auto* end = numbers + tensor.numel();
  const auto* found = std::find_if(numbers, end, [](Number n) { return !std::isfinite(static_cast<double>(n)); });
  return found == end ? nullptr : found;
}

/// The first number of a loss that is infinite or NaN, if any.
std::optional<double> not_finite(const et::EValue& loss) {
  const auto number = [](const auto* found) {
    return found == nullptr ? std::nullopt : std::optional<double>(static_cast<double>(*found));
  };
  if (loss.isDouble()) {
    return std::isfinite(loss.toDouble()) ? std::nullopt : std::optional<double>(loss.toDouble());
  }
  if (!loss.isTensor()) {
    return std::nullopt;
  }
  const executorch::aten::Tensor& tensor = loss.toTensor();
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return number(find_not_finite<float>(tensor));
    case ScalarType::Double:
      return number(find_not_finite<double>(tensor));
    case ScalarType::Half:
      return number(find_not_finite<executorch::aten::Half>(tensor));
    case ScalarType::BFloat16:
      return number(find_not_finite<executorch::aten::BFloat16>(tensor));
    default:
      return std::nullopt;
  }
}

SavedTensors copies_of(const NamedTensors& tensors) {
  SavedTensors copies;
  for (const auto& [name, tensor] : tensors) {
    const auto* data = static_cast<const uint8_t*>(tensor->const_data_ptr());
    copies.emplace_back(
        name, std::make_shared<const SavedTensor>(SavedTensor{saved_layout(*tensor), {data, data + tensor->nbytes()}}));
  }
  return copies;
}

/// Copy values into tensors of the same names.
void put(const SavedTensors& values, const StateDict& tensors) {
  for (const auto& [name, value] : values) {
    if (!value->bytes.empty()) {
      std::memcpy(tensors.at(name)->mutable_data_ptr(), value->bytes.data(), value->bytes.size());
    }
  }
}

StateDict by_name(const NamedTensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

} // namespace

struct TrainingProgram::Impl {
  Impl(std::shared_ptr<Program> given, const std::string& name)
      : program(std::move(given)),
        method(program->load_method(name)),
        signature(read_signature(*program, *method)),
        turns(program->path(), format("method '{}'", name)) {
    for (size_t i = 0; i < signature.names.size(); ++i) {
      ordered_parameters.emplace_back(signature.names[i], method->output_memory(signature.first_parameter() + i));
    }
    for (size_t i = 0; i < signature.names.size(); ++i) {
      const TensorPtr gradient = method->output_memory(signature.first_gradient + i);
      const auto& [parameter_name, parameter] = ordered_parameters[i];
      if (!same_layout(*parameter, *gradient)) {
        throw_not_for_training(
            *program,
            *method,
            format("the gradient of '{}' differs from it in shape, dtype or strides", parameter_name));
      }
      gradients.emplace(parameter_name, gradient);
    }
    parameters = by_name(ordered_parameters);
    for (auto& [state_name, tensor] : method->state_memory()) {
      if (parameters.count(state_name) == 0) {
        ordered_buffers.emplace_back(state_name, tensor);
      }
    }
    buffers = by_name(ordered_buffers);
    nameless = signature.buffers - std::min(signature.buffers, ordered_buffers.size());
  }

  Outputs run(const std::vector<et::EValue>& inputs, const std::vector<bool>& in_place) {
    return method->execute(inputs, {signature.first_gradient, in_place});
  }

  std::vector<std::string> inputs() const {
    std::vector<std::string> files = {program->path()};
    for (const BlobCache* cache = program->cache().get(); cache != nullptr; cache = cache->base().get()) {
      const std::vector<std::string> own = cache->files();
      files.insert(files.end(), own.begin(), own.end());
    }
    return files;
  }

  /// A digest of the external weights that are not trained; empty without such weights.
  std::string frozen() const {
    std::set<std::string> keys;
    for (const std::string& key : program->needs(method->name())) {
      if (parameters.count(key) == 0 && buffers.count(key) == 0) {
        keys.insert(key);
      }
    }
    const BlobCache& cache = *program->cache();
    const BlobCache::Reading reading(cache);
    Hasher hasher;
    for (const std::string& key : keys) {
      const Blob* blob = cache.find(key);
      if (blob == nullptr) {
        throw_error(ErrorKind::KeyNotFound, "{}: no key '{}'", cache.name(), key);
      }
      const std::optional<std::string> known = cache.recorded_digest(key);
      const std::string digest = known ? hexadecimal(reinterpret_cast<const uint8_t*>(known->data()), known->size())
                                       : to_string(internal::digest(blob->data, blob->size));
      std::string entry = key;
      entry.append(1, '\0').append(digest).append(1, ':').append(std::to_string(blob->size)).append(1, '\0');
      hasher.update(entry.data(), entry.size());
    }
    return keys.empty() ? "" : to_string(hasher.digest());
  }

  /// Check that a checkpoint is of this model and of these frozen weights.
  void check_fit(const std::string& path, const Checkpoint& saved) const {
    check_fit(path, "parameters", ordered_parameters, saved.parameters);
    check_fit(path, "buffers", ordered_buffers, saved.buffers);
    const std::string own = frozen();
    if (saved.frozen != own) {
      const auto shown = [](const std::string& digest) { return digest.empty() ? "none" : digest; };
      throw_error_in(
          ErrorKind::Checkpoint,
          path,
          "the checkpoint was made with other frozen weights than those of {}: their digest was {}, it is {}",
          program->cache()->name(),
          shown(saved.frozen),
          shown(own));
    }
  }

  void check_fit(const std::string& path, const char* kind, const NamedTensors& own, const SavedTensors& theirs) const {
    const auto refuse = [&](const std::string& difference) {
      throw_error_in(
          ErrorKind::Checkpoint, path, "a checkpoint of another model than {}: {}", program->path(), difference);
    };
    std::map<std::string, const SavedTensor*> unknown;
    for (const auto& [name, tensor] : theirs) {
      unknown.emplace(name, tensor.get());
    }
    Names lacking;
    for (const auto& [name, tensor] : own) {
      const auto found = unknown.find(name);
      if (found == unknown.end()) {
        lacking.push_back(name);
        continue;
      }
      const Layout expected = saved_layout(*tensor);
      if (found->second->layout != expected) {
        refuse(format(
            "'{}' is {} in the program, {} in the checkpoint",
            name,
            to_string(expected),
            to_string(found->second->layout)));
      }
      unknown.erase(found);
    }
    Names more;
    for (const auto& [name, tensor] : unknown) {
      more.push_back(name);
    }
    if (!lacking.empty() || !more.empty()) {
      refuse(format(
          "it {}{}{}",
          lacking.empty() ? "" : format("lacks the {} {}", kind, quoted(lacking)),
          lacking.empty() || more.empty() ? "" : " and ",
          more.empty() ? "" : format("has the unknown {} {}", kind, quoted(more))));
    }
  }

  Error not_finite_error(double loss) const {
    const std::string changed =
        nameless == 0 ? "nothing was changed" : format("nothing but {} buffers without names was changed", nameless);
    return Error(
        ErrorKind::NotFiniteLoss,
        program->path(),
        format("method '{}': the loss is {}; {}", method->name(), std::to_string(loss), changed));
  }

  std::shared_ptr<Program> program;
  std::shared_ptr<Method> method;
  Signature signature;
  NamedTensors ordered_parameters;
  NamedTensors ordered_buffers;
  StateDict parameters;
  StateDict gradients;
  StateDict buffers;
  size_t nameless = 0;
  Turns turns;
};

TrainingProgram::TrainingProgram(std::shared_ptr<Program> program, const std::string& method)
    : impl_(std::make_unique<Impl>(std::move(program), method)) {}

TrainingProgram::~TrainingProgram() = default;

const std::shared_ptr<Program>& TrainingProgram::program() const {
  return impl_->program;
}

const std::shared_ptr<Method>& TrainingProgram::method() const {
  return impl_->method;
}

const std::vector<std::string>& TrainingProgram::names() const {
  return impl_->signature.names;
}

size_t TrainingProgram::outputs() const {
  return impl_->signature.first_gradient;
}

size_t TrainingProgram::nameless() const {
  return impl_->nameless;
}

const StateDict& TrainingProgram::named_parameters() const {
  return impl_->parameters;
}

const StateDict& TrainingProgram::named_gradients() const {
  return impl_->gradients;
}

const StateDict& TrainingProgram::named_buffers() const {
  return impl_->buffers;
}

Outputs TrainingProgram::forward_backward(const std::vector<et::EValue>& inputs, const std::vector<bool>& in_place) {
  const std::lock_guard<Turns> turn(impl_->turns);
  Restore buffers(impl_->ordered_buffers);
  Outputs outputs = impl_->run(inputs, in_place);
  buffers.dismiss();
  return outputs;
}

Outputs TrainingProgram::step(
    Optimizer& optimizer, const std::vector<et::EValue>& inputs, OnNan on_nan, const std::vector<bool>& in_place) {
  const std::lock_guard<Turns> turn(impl_->turns);
  Restore buffers(impl_->ordered_buffers);
  Outputs outputs = impl_->run(inputs, in_place);
  if (on_nan != OnNan::Accept) {
    if (const std::optional<double> loss = not_finite(outputs[0])) {
      if (on_nan == OnNan::Throw) {
        throw impl_->not_finite_error(*loss);
      }
      return outputs;
    }
  }
  optimizer.step(impl_->parameters, impl_->gradients);
  buffers.dismiss();
  return outputs;
}

void TrainingProgram::lock() {
  impl_->turns.lock();
}

void TrainingProgram::unlock() {
  impl_->turns.unlock();
}

uint64_t TrainingProgram::save(
    const std::string& path,
    const Optimizer* optimizer,
    const std::vector<std::string>& base,
    const std::map<std::string, std::string>& metadata) {
  if (impl_->nameless != 0) {
    throw_error_in(
        ErrorKind::Unsupported,
        impl_->program->path(),
        "method '{}' changes {} buffers that have no names, so a checkpoint would lack them; lower it with "
        "emit_mutable_buffer_names",
        impl_->method->name(),
        impl_->nameless);
  }
  const std::vector<PtdFile> bases = open_bases(base);
  std::vector<std::string> inputs = impl_->inputs();
  inputs.insert(inputs.end(), base.begin(), base.end());
  Checkpoint moment;
  {
    const std::lock_guard<Turns> turn(impl_->turns);
    if (optimizer != nullptr) {
      moment.optimizer = optimizer->capture(impl_->ordered_parameters);
    }
    moment.parameters = copies_of(impl_->ordered_parameters);
    moment.buffers = copies_of(impl_->ordered_buffers);
  }
  moment.frozen = impl_->frozen();
  return write_checkpoint(path, moment, bases, metadata, inputs);
}

void TrainingProgram::load(const std::string& path, Optimizer* optimizer, const std::vector<std::string>& base) {
  const Checkpoint saved = read_checkpoint(path, open_bases(base));
  impl_->check_fit(path, saved);
  const std::lock_guard<Turns> turn(impl_->turns);
  if (optimizer != nullptr) {
    if (!saved.optimizer) {
      throw_error_in(ErrorKind::Checkpoint, path, "the checkpoint has no state of an optimizer");
    }
    optimizer->restore(*saved.optimizer, impl_->ordered_parameters, path);
  }
  put(saved.parameters, impl_->parameters);
  put(saved.buffers, impl_->buffers);
}

Updated TrainingProgram::publish(const LogicalTensors& target, bool strict, bool finite) {
  return TrainingAccess::publish(*this, TensorsAccess::of(target), strict, finite);
}

Updated TrainingProgram::publish(const std::shared_ptr<BlobCache>& target, bool strict, bool finite) {
  return publish(LogicalTensors(target), strict, finite);
}

} // namespace blobstore

namespace blobstore::internal {

Updated TrainingAccess::publish(TrainingProgram& training, const CacheTensors& target, bool strict, bool finite) {
  TrainingProgram::Impl& impl = *training.impl_;
  const Trained trained{*impl.program, impl.method->name(), impl.ordered_parameters, impl.ordered_buffers};
  return internal::publish(trained, target, strict, finite, impl.turns);
}

} // namespace blobstore::internal
