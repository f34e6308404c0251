// Training in Java.
#include <cstring>
#include <mutex>

#include <blobstore/mezo.h>
#include <blobstore/training.h>

#include "convert.h"
#include "logical/dim_order.h"

namespace blobstore::java {
namespace {

jlong make_sgd(
    JNIEnv* env, jclass, jdouble lr, jdouble momentum, jdouble dampening, jdouble weight_decay, jboolean nesterov) {
  return guarded(env, [&] {
    const SGDOptions options{lr, momentum, dampening, weight_decay, nesterov != JNI_FALSE};
    return share<Optimizer>(std::make_shared<SGD>(options)); // `step` takes any optimizer
  });
}

jlong make_adamw(
    JNIEnv* env,
    jclass,
    jdouble lr,
    jdouble beta1,
    jdouble beta2,
    jdouble eps,
    jdouble weight_decay,
    jboolean amsgrad) {
  return guarded(env, [&] {
    const AdamWOptions options{lr, beta1, beta2, eps, weight_decay, amsgrad != JNI_FALSE};
    return share<Optimizer>(std::make_shared<AdamW>(options));
  });
}

jlong load(JNIEnv* env, jclass, jlong program, jstring method) {
  return guarded(
      env, [&] { return share(std::make_shared<TrainingProgram>(shared<Program>(program), to_string(env, method))); });
}

jobjectArray names(JNIEnv* env, jclass, jlong training) {
  return guarded(env, [&] { return to_java(env, object<TrainingProgram>(training).names()).give(); });
}

const executorch::extension::TensorPtr& parameter_of(const TrainingProgram& training, const std::string& name) {
  const auto found = training.named_parameters().find(name);
  if (found == training.named_parameters().end()) {
    throw Error(ErrorKind::KeyNotFound, "no parameter '" + name + "' is trained");
  }
  return found->second;
}

jobject parameter(JNIEnv* env, jclass, jlong handle, jstring name) {
  return guarded(env, [&] {
    auto& training = object<TrainingProgram>(handle);
    const auto& found = parameter_of(training, to_string(env, name));
    const std::lock_guard<TrainingProgram> turn(training);
    return copy_to_java(env, *found).give();
  });
}

void set_parameter(JNIEnv* env, jclass, jlong handle, jstring name, jobject tensor) {
  guarded(env, [&] {
    auto& training = object<TrainingProgram>(handle);
    const std::string wanted = to_string(env, name);
    const auto& found = parameter_of(training, wanted);
    const View given = view_of(env, tensor);
    if (const Layout expected = internal::layout_of(*found); given.layout() != expected) {
      throw Error(
          ErrorKind::Layout,
          "the parameter '" + wanted + "' is " + blobstore::to_string(expected) + ", not " +
              blobstore::to_string(given.layout()) +
              (expected.sizes == given.layout().sizes ? ", or has another order of dimensions" : ""));
    }
    const std::lock_guard<TrainingProgram> turn(training);
    if (given.nbytes != 0) {
      std::memcpy(found->mutable_data_ptr(), given.data, given.nbytes);
    }
  });
}

jobjectArray step(JNIEnv* env, jclass, jlong handle, jlong optimizer, jobjectArray values, jint on_nan) {
  return guarded(env, [&] {
    auto& training = object<TrainingProgram>(handle);
    const Inputs inputs(env, values, training.method()->meta());
    return copy_to_java(env, training.step(object<Optimizer>(optimizer), inputs.list(), static_cast<OnNan>(on_nan)))
        .give();
  });
}

/// @param optimizer may be 0, here and below.
jlong save(JNIEnv* env, jclass, jlong training, jlong optimizer, jstring path, jobjectArray base) {
  return guarded(env, [&] {
    const auto kept = shared<Optimizer>(optimizer);
    return static_cast<jlong>(
        object<TrainingProgram>(training).save(to_path(env, path), kept.get(), to_paths(env, base)));
  });
}

void load_checkpoint(JNIEnv* env, jclass, jlong training, jlong optimizer, jstring path, jobjectArray base) {
  guarded(env, [&] {
    const auto kept = shared<Optimizer>(optimizer);
    object<TrainingProgram>(training).load(to_path(env, path), kept.get(), to_paths(env, base));
  });
}

jlong publish(JNIEnv* env, jclass, jlong training, jlong tensors, jboolean strict, jboolean finite) {
  return guarded(env, [&] {
    return static_cast<jlong>(object<TrainingProgram>(training).publish(
        object<LogicalTensors>(tensors), strict != JNI_FALSE, finite != JNI_FALSE));
  });
}

MeZOOptions mezo_options(jdouble lr, jdouble eps, jlong seed) {
  return {lr, eps, static_cast<uint64_t>(seed)};
}

jlong make_mezo(JNIEnv* env, jclass, jlong cache, jdouble lr, jdouble eps, jlong seed, jobjectArray names) {
  return guarded(env, [&] {
    return share(std::make_shared<MeZO>(shared<BlobCache>(cache), mezo_options(lr, eps, seed), to_strings(env, names)));
  });
}

jobjectArray mezo_names(JNIEnv* env, jclass, jlong mezo) {
  return guarded(env, [&] { return to_java(env, object<MeZO>(mezo).names()).give(); });
}

jlong mezo_steps(JNIEnv*, jclass, jlong mezo) {
  return static_cast<jlong>(object<MeZO>(mezo).steps());
}

void mezo_set_steps(JNIEnv*, jclass, jlong mezo, jlong steps) {
  object<MeZO>(mezo).set_steps(static_cast<uint64_t>(steps));
}

void mezo_set_options(JNIEnv* env, jclass, jlong mezo, jdouble lr, jdouble eps, jlong seed) {
  guarded(env, [&] { object<MeZO>(mezo).set_options(mezo_options(lr, eps, seed)); });
}

jdouble mezo_step(JNIEnv* env, jclass, jlong mezo, jobject loss) {
  return guarded(env, [&] {
    const Local<jclass> type(env, env->GetObjectClass(loss));
    const jmethodID method = checked(env, env->GetMethodID(type.get(), "getAsDouble", "()D"));
    return object<MeZO>(mezo).step([&] { return checked(env, env->CallDoubleMethod(loss, method)); });
  });
}

} // namespace

void add_training(std::vector<JNINativeMethod>& functions) {
  functions.insert(
      functions.end(),
      {function("makeSgd", "(DDDDZ)J", &make_sgd),
       function("makeAdamW", "(DDDDDZ)J", &make_adamw),
       function("loadTraining", "(JLjava/lang/String;)J", &load),
       function("trainingNames", "(J)[Ljava/lang/String;", &names),
       function("trainingParameter", "(JLjava/lang/String;)Ldev/blobstore/Tensor;", &parameter),
       function("trainingSetParameter", "(JLjava/lang/String;Ldev/blobstore/Tensor;)V", &set_parameter),
       function("trainingStep", "(JJ[Ljava/lang/Object;I)[Ljava/lang/Object;", &step),
       function("trainingSave", "(JJLjava/lang/String;[Ljava/lang/String;)J", &save),
       function("trainingLoad", "(JJLjava/lang/String;[Ljava/lang/String;)V", &load_checkpoint),
       function("trainingPublish", "(JJZZ)J", &publish),
       function("makeMezo", "(JDDJ[Ljava/lang/String;)J", &make_mezo),
       function("mezoNames", "(J)[Ljava/lang/String;", &mezo_names),
       function("mezoSteps", "(J)J", &mezo_steps),
       function("mezoSetSteps", "(JJ)V", &mezo_set_steps),
       function("mezoSetOptions", "(JDDJ)V", &mezo_set_options),
       function("mezoStep", "(JLjava/util/function/DoubleSupplier;)D", &mezo_step)});
}

} // namespace blobstore::java
