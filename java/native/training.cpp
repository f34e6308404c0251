// Training in Java.
#include <cstring>
#include <mutex>

#include <blobstore/mezo.h>
#include <blobstore/training.h>

#include "crossing.h"

namespace blobstore::java {
namespace {

/// What computes the loss, during a call.
struct Loss {
  JNIEnv* env;
  jobject supplier;

  double operator()() const {
    const Local<jclass> type(env, env->GetObjectClass(supplier));
    const jmethodID method = checked(env, env->GetMethodID(type.get(), "getAsDouble", "()D"));
    return checked(env, env->CallDoubleMethod(supplier, method));
  }
};

} // namespace

template <>
struct Crossing<Loss> {
  using Java = jobject;
  static std::string signature() { return "Ljava/util/function/DoubleSupplier;"; }
  static Loss from(JNIEnv* env, jobject supplier) { return {env, supplier}; }
};

namespace {

// `step` takes any optimizer, so both are shared as one
std::shared_ptr<Optimizer> make_sgd(double lr, double momentum, double dampening, double weight_decay, bool nesterov) {
  return std::make_shared<SGD>(SGDOptions{lr, momentum, dampening, weight_decay, nesterov});
}

std::shared_ptr<Optimizer> make_adamw(
    double lr, double beta1, double beta2, double eps, double weight_decay, bool amsgrad) {
  return std::make_shared<AdamW>(AdamWOptions{lr, beta1, beta2, eps, weight_decay, amsgrad});
}

std::shared_ptr<TrainingProgram> load(const std::shared_ptr<Program>& program, const std::string& method) {
  return std::make_shared<TrainingProgram>(program, method);
}

const executorch::extension::TensorPtr& parameter_of(const TrainingProgram& training, const std::string& name) {
  const auto found = training.named_parameters().find(name);
  if (found == training.named_parameters().end()) {
    throw Error(ErrorKind::KeyNotFound, "no parameter '" + name + "' is trained");
  }
  return found->second;
}

NewTensor parameter(JNIEnv* env, TrainingProgram& training, const std::string& name) {
  const auto& found = parameter_of(training, name);
  const std::lock_guard<TrainingProgram> turn(training);
  return copy_to_java(env, *found);
}

void set_parameter(TrainingProgram& training, const std::string& name, const View& given) {
  const auto& found = parameter_of(training, name);
  if (const Layout expected = layout_of(*found); given.layout != expected) {
    throw Error(
        ErrorKind::Layout,
        "the parameter '" + name + "' is " + blobstore::to_string(expected) + ", not " +
            blobstore::to_string(given.layout) +
            (expected.sizes == given.layout.sizes ? ", or has another order of dimensions" : ""));
  }
  const std::lock_guard<TrainingProgram> turn(training);
  if (given.nbytes != 0) {
    std::memcpy(found->mutable_data_ptr(), given.data, given.nbytes);
  }
}

Local<jobjectArray> step(
    JNIEnv* env, TrainingProgram& training, Optimizer& optimizer, jobjectArray values, OnNan on_nan) {
  const Inputs inputs(env, values, training.method()->meta());
  return copy_to_java(env, training.step(optimizer, inputs.list(), on_nan));
}

/// @param optimizer may be null, here and below.
uint64_t save(
    TrainingProgram& training, const std::shared_ptr<Optimizer>& optimizer, const Path& path, const Paths& base) {
  return training.save(path.text, optimizer.get(), base.all);
}

void load_checkpoint(
    TrainingProgram& training, const std::shared_ptr<Optimizer>& optimizer, const Path& path, const Paths& base) {
  training.load(path.text, optimizer.get(), base.all);
}

Updated publish(TrainingProgram& training, const LogicalTensors& tensors, bool strict, bool finite) {
  return training.publish(tensors, strict, finite);
}

std::shared_ptr<MeZO> make_mezo(
    const std::shared_ptr<BlobCache>& cache,
    double lr,
    double eps,
    uint64_t seed,
    const std::vector<std::string>& names) {
  return std::make_shared<MeZO>(cache, MeZOOptions{lr, eps, seed}, names);
}

void mezo_set_options(MeZO& mezo, double lr, double eps, uint64_t seed) {
  mezo.set_options({lr, eps, seed});
}

double mezo_step(MeZO& mezo, const Loss& loss) {
  return mezo.step(loss);
}

} // namespace

std::vector<Row> training_rows() {
  return {
      row<&make_sgd>("makeSgd"),
      row<&make_adamw>("makeAdamW"),
      row<&load>("loadTraining"),
      row<&TrainingProgram::names>("trainingNames"),
      row<&parameter>("trainingParameter"),
      row<&set_parameter>("trainingSetParameter"),
      row<&step>("trainingStep"),
      row<&save>("trainingSave"),
      row<&load_checkpoint>("trainingLoad"),
      row<&publish>("trainingPublish"),
      row<&make_mezo>("makeMezo"),
      row<&MeZO::names>("mezoNames"),
      row<&MeZO::steps>("mezoSteps"),
      row<&MeZO::set_steps>("mezoSetSteps"),
      row<&mezo_set_options>("mezoSetOptions"),
      row<&mezo_step>("mezoStep")};
}

} // namespace blobstore::java
