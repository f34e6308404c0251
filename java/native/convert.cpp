#include "convert.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include "crossing.h"
#include "text.h"

namespace blobstore::java {

namespace et = executorch::runtime;
using EtTensor = executorch::aten::Tensor;

namespace {

/// What every call needs, found when the library is loaded. References to classes are global, and never given back.
struct Classes {
  jclass object = nullptr;
  jclass boolean = nullptr;
  jclass integer = nullptr;
  jclass long_ = nullptr;
  jclass float_ = nullptr;
  jclass double_ = nullptr;
  jmethodID make_boolean = nullptr;
  jmethodID make_long = nullptr;
  jmethodID make_double = nullptr;
  jmethodID boolean_value = nullptr;
  jmethodID long_value = nullptr; // of a Number
  jmethodID double_value = nullptr;

  jclass error = nullptr;
  jmethodID make_error = nullptr;

  jclass tensor = nullptr;
  jmethodID allocate = nullptr;
  jfieldID data = nullptr;
  jfieldID type = nullptr;
  jfieldID sizes = nullptr;
  jfieldID order = nullptr;

  jfieldID names = nullptr; // of a Named
  jfieldID tensors = nullptr;
};
Classes classes;

jclass find(JNIEnv* env, const char* name) {
  const Local<jclass> found(env, checked(env, env->FindClass(name)));
  return static_cast<jclass>(checked(env, env->NewGlobalRef(found.get())));
}

void leave(JNIEnv* env, const Error& error) {
  const Local<jstring> path = to_java(env, error.path());
  const Local<jstring> reason = to_java(env, error.reason());
  const Local<jthrowable> made(
      env,
      static_cast<jthrowable>(checked(
          env,
          env->CallStaticObjectMethod(
              classes.error,
              classes.make_error,
              static_cast<jint>(error.kind()),
              path.get(),
              reason.get(),
              static_cast<jint>(error.number())))));
  env->Throw(made.get());
}

/// Leave an exception of the class by its name, or another one if even this fails.
void leave(JNIEnv* env, const char* name, const char* message) noexcept {
  const jclass type = env->FindClass(name);
  if (type != nullptr) {
    env->ThrowNew(type, message);
    env->DeleteLocalRef(type);
  }
}

std::vector<uint8_t> row_major(size_t rank) {
  std::vector<uint8_t> order(rank);
  std::iota(order.begin(), order.end(), uint8_t{0});
  return order;
}

[[noreturn]] void throw_deep(size_t rank) {
  throw Error(
      ErrorKind::UnsupportedData,
      "a tensor has at most " + std::to_string(et::kTensorDimensionLimit) + " dimensions, not " + std::to_string(rank));
}

} // namespace

void find_classes(JNIEnv* env) {
  Classes found;
  found.object = find(env, "java/lang/Object");
  found.boolean = find(env, "java/lang/Boolean");
  found.integer = find(env, "java/lang/Integer");
  found.long_ = find(env, "java/lang/Long");
  found.float_ = find(env, "java/lang/Float");
  found.double_ = find(env, "java/lang/Double");
  const auto method_of = [&](jclass type, const char* name, const char* signature) {
    return checked(env, env->GetMethodID(type, name, signature));
  };
  const auto static_of = [&](jclass type, const char* name, const char* signature) {
    return checked(env, env->GetStaticMethodID(type, name, signature));
  };
  found.make_boolean = static_of(found.boolean, "valueOf", "(Z)Ljava/lang/Boolean;");
  found.make_long = static_of(found.long_, "valueOf", "(J)Ljava/lang/Long;");
  found.make_double = static_of(found.double_, "valueOf", "(D)Ljava/lang/Double;");
  found.boolean_value = method_of(found.boolean, "booleanValue", "()Z");
  const Local<jclass> number(env, checked(env, env->FindClass("java/lang/Number")));
  found.long_value = method_of(number.get(), "longValue", "()J");
  found.double_value = method_of(number.get(), "doubleValue", "()D");

  found.error = find(env, "dev/blobstore/BlobStoreException");
  found.make_error =
      static_of(found.error, "of", "(ILjava/lang/String;Ljava/lang/String;I)Ldev/blobstore/BlobStoreException;");

  found.tensor = find(env, "dev/blobstore/Tensor");
  found.allocate = static_of(found.tensor, "allocate", "(I[I[I)Ldev/blobstore/Tensor;");
  const auto field_of = [&](jclass type, const char* name, const char* signature) {
    return checked(env, env->GetFieldID(type, name, signature));
  };
  found.data = field_of(found.tensor, "data", "Ljava/nio/ByteBuffer;");
  found.type = field_of(found.tensor, "type", "I");
  found.sizes = field_of(found.tensor, "sizes", "[I");
  found.order = field_of(found.tensor, "order", "[I");
  const Local<jclass> named(env, checked(env, env->FindClass("dev/blobstore/Named")));
  found.names = field_of(named.get(), "names", "[Ljava/lang/String;");
  found.tensors = field_of(named.get(), "tensors", "[Ldev/blobstore/Tensor;");
  classes = found;
}

void throw_java(JNIEnv* env, const char* name, const char* message) {
  leave(env, name, message);
  throw Pending();
}

void leave_exception(JNIEnv* env) noexcept {
  try {
    throw;
  } catch (const Pending&) {
  } catch (const Error& error) {
    try {
      leave(env, error);
    } catch (const Pending&) { // memory ran out, for example
    } catch (const std::exception&) {
      leave(env, "java/lang/OutOfMemoryError", "blobstore");
    }
  } catch (const std::bad_alloc&) {
    leave(env, "java/lang/OutOfMemoryError", "blobstore: out of native memory");
  } catch (const std::exception& error) { // a mistake in the library
    leave(env, "java/lang/InternalError", error.what());
  }
}

std::string to_string(JNIEnv* env, jstring text) {
  std::u16string copy(static_cast<size_t>(env->GetStringLength(not_null(env, text, "a string is null"))), u'\0');
  static_assert(sizeof(jchar) == sizeof(char16_t));
  env->GetStringRegion(text, 0, static_cast<jsize>(copy.size()), reinterpret_cast<jchar*>(copy.data()));
  check(env);
  return to_utf8(copy);
}

std::string to_path(JNIEnv* env, jstring text) {
  std::string path = to_string(env, text);
  if (path.find('\0') != std::string::npos) {
    throw Error(ErrorKind::FileAccess, "a path has a NUL, at position " + std::to_string(path.find('\0')));
  }
  return path;
}

Local<jstring> to_java(JNIEnv* env, const std::string& text) {
  const std::u16string wide = to_utf16(text);
  return {
      env, checked(env, env->NewString(reinterpret_cast<const jchar*>(wide.data()), static_cast<jsize>(wide.size())))};
}

Local<jintArray> to_java(JNIEnv* env, const std::vector<jint>& numbers) {
  const auto size = static_cast<jsize>(numbers.size());
  Local<jintArray> array(env, checked(env, env->NewIntArray(size)));
  env->SetIntArrayRegion(array.get(), 0, size, numbers.data());
  check(env);
  return array;
}

std::optional<double> Crossing<std::optional<double>>::from(JNIEnv* env, jobject number) {
  const Local<jclass> type(env, env->GetObjectClass(not_null(env, number, "an OptionalDouble is null")));
  const jmethodID is_present = checked(env, env->GetMethodID(type.get(), "isPresent", "()Z"));
  const jmethodID value = checked(env, env->GetMethodID(type.get(), "getAsDouble", "()D"));
  const bool present = checked(env, env->CallBooleanMethod(number, is_present)) != JNI_FALSE;
  return present ? std::optional<double>(checked(env, env->CallDoubleMethod(number, value))) : std::nullopt;
}

Local<> Crossing<std::optional<double>>::to(JNIEnv* env, const std::optional<double>& number) {
  const Local<jclass> type(env, checked(env, env->FindClass("java/util/OptionalDouble")));
  const jmethodID maker = checked(
      env,
      number ? env->GetStaticMethodID(type.get(), "of", "(D)Ljava/util/OptionalDouble;")
             : env->GetStaticMethodID(type.get(), "empty", "()Ljava/util/OptionalDouble;"));
  return {env, checked(env, env->CallStaticObjectMethod(type.get(), maker, number.value_or(0)))};
}

NewTensor new_tensor(JNIEnv* env, const Layout& layout) {
  if (item_size(layout.scalar_type) == 0) {
    throw Error(ErrorKind::UnsupportedData, to_string(layout) + " has elements of an unknown type");
  }
  if (layout.sizes.size() > et::kTensorDimensionLimit) {
    throw_deep(layout.sizes.size());
  }
  const Local<jintArray> sizes = to_java(env, std::vector<jint>(layout.sizes.begin(), layout.sizes.end()));
  std::vector<jint> order(layout.dim_order.begin(), layout.dim_order.end());
  bool row_major = true;
  for (size_t i = 0; i < order.size(); ++i) {
    row_major = row_major && order[i] == static_cast<jint>(i);
  }
  const Local<jintArray> dims = row_major ? Local<jintArray>(env, nullptr) : to_java(env, order);
  Local<> tensor(
      env,
      checked(
          env,
          env->CallStaticObjectMethod(
              classes.tensor, classes.allocate, static_cast<jint>(layout.scalar_type), sizes.get(), dims.get())));
  const Local<> data(env, env->GetObjectField(tensor.get(), classes.data));
  void* const address = env->GetDirectBufferAddress(data.get());
  return {std::move(tensor), address};
}

Layout layout_of(const EtTensor& tensor) {
  const auto order = tensor.dim_order();
  return {
      static_cast<int8_t>(tensor.scalar_type()),
      {tensor.sizes().begin(), tensor.sizes().end()},
      order.data() == nullptr ? row_major(static_cast<size_t>(tensor.dim()))
                              : std::vector<uint8_t>(order.begin(), order.end())};
}

NewTensor copy_to_java(JNIEnv* env, const EtTensor& tensor) {
  NewTensor made = new_tensor(env, layout_of(tensor));
  if (const size_t size = tensor.nbytes(); size != 0) {
    std::memcpy(made.data, tensor.const_data_ptr(), size);
  }
  return made;
}

namespace {

std::vector<jint> ints_of(JNIEnv* env, jintArray numbers) {
  std::vector<jint> out(static_cast<size_t>(env->GetArrayLength(numbers)));
  env->GetIntArrayRegion(numbers, 0, static_cast<jsize>(out.size()), out.data());
  check(env);
  return out;
}

/// Whether ExecuTorch can count its elements.
bool countable(const Layout& layout) {
  return executorch::aten::safe_numel(layout.sizes.data(), static_cast<ssize_t>(layout.sizes.size())).ok();
}

} // namespace

View view_of(JNIEnv* env, jobject tensor) {
  const int type = env->GetIntField(not_null(env, tensor, "a tensor is null"), classes.type);
  const Local<jintArray> sizes(env, static_cast<jintArray>(env->GetObjectField(tensor, classes.sizes)));
  const Local<jintArray> order(env, static_cast<jintArray>(env->GetObjectField(tensor, classes.order)));
  const Local<> data(env, env->GetObjectField(tensor, classes.data));
  View view{{static_cast<int8_t>(type), ints_of(env, sizes.get()), {}}, nullptr, 0};
  const size_t rank = view.layout.sizes.size();
  if (rank > et::kTensorDimensionLimit) {
    throw_deep(rank);
  }
  if (order) {
    const std::vector<jint> dims = ints_of(env, order.get());
    view.layout.dim_order.assign(dims.begin(), dims.end());
  } else {
    view.layout.dim_order = row_major(rank);
  }
  view.data = env->GetDirectBufferAddress(data.get());
  view.nbytes = static_cast<size_t>(env->GetDirectBufferCapacity(data.get()));
  // the constructor in Java compared the two, so this is about memory that was not made by it
  const std::optional<uint64_t> nbytes = layout_nbytes(view.layout);
  if (nbytes != view.nbytes || (view.data == nullptr && nbytes != 0)) {
    throw Error(ErrorKind::UnsupportedData, "the memory of a tensor is not that of a direct buffer");
  }
  const size_t item = item_size(view.layout.scalar_type);
  if (view.nbytes != 0 && reinterpret_cast<uintptr_t>(view.data) % item != 0) {
    throw Error(
        ErrorKind::UnsupportedData,
        "the buffer of " + blobstore::to_string(view.layout) + " begins at an address that is no multiple of " +
            std::to_string(item) + "; it is a slice of another one");
  }
  return view;
}

StateDict to_state_dict(JNIEnv* env, jobject named) {
  const Local<jobjectArray> texts(env, static_cast<jobjectArray>(env->GetObjectField(named, classes.names)));
  const Local<jobjectArray> tensors(env, static_cast<jobjectArray>(env->GetObjectField(named, classes.tensors)));
  const std::vector<std::string> names = to_strings(env, texts.get(), to_string);
  StateDict out;
  for (size_t i = 0; i < names.size(); ++i) {
    const Local<> tensor(env, checked(env, env->GetObjectArrayElement(tensors.get(), static_cast<jsize>(i))));
    const View view = view_of(env, tensor.get());
    if (!countable(view.layout)) {
      throw Error(ErrorKind::UnsupportedData, "'" + names[i] + "' is too large");
    }
    out[names[i]] = executorch::extension::make_tensor_ptr(
        view.layout.sizes,
        view.data,
        view.layout.dim_order,
        {},
        static_cast<executorch::aten::ScalarType>(view.layout.scalar_type));
  }
  return out;
}

Inputs::Inputs(JNIEnv* env, jobjectArray values, const et::MethodMeta& method) {
  const auto count = static_cast<size_t>(env->GetArrayLength(not_null(env, values, "the array of inputs is null")));
  places_.reserve(count);
  list_.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const Local<> held(env, checked(env, env->GetObjectArrayElement(values, static_cast<jsize>(i))));
    const jobject value = held.get();
    if (value == nullptr) {
      continue;
    }
    if (env->IsInstanceOf(value, classes.tensor) != JNI_FALSE) {
      take_tensor(env, i, value);
    } else if (
        env->IsInstanceOf(value, classes.long_) != JNI_FALSE ||
        env->IsInstanceOf(value, classes.integer) != JNI_FALSE) {
      const et::Result<et::Tag> tag =
          i < method.num_inputs() ? method.input_tag(i) : et::Result<et::Tag>(et::Tag::None);
      const auto number = static_cast<int64_t>(checked(env, env->CallLongMethod(value, classes.long_value)));
      const bool real = tag.ok() && tag.get() == et::Tag::Double;
      list_[i] = real ? et::EValue(static_cast<double>(number)) : et::EValue(number);
    } else if (
        env->IsInstanceOf(value, classes.double_) != JNI_FALSE ||
        env->IsInstanceOf(value, classes.float_) != JNI_FALSE) {
      list_[i] = et::EValue(static_cast<double>(checked(env, env->CallDoubleMethod(value, classes.double_value))));
    } else if (env->IsInstanceOf(value, classes.boolean) != JNI_FALSE) {
      list_[i] = et::EValue(checked(env, env->CallBooleanMethod(value, classes.boolean_value)) != JNI_FALSE);
    } else {
      throw Error(
          ErrorKind::UnsupportedData,
          "input " + std::to_string(i) + " must be a Tensor, Long, Integer, Double, Float, Boolean or null");
    }
  }
}

void Inputs::take_tensor(JNIEnv* env, size_t index, jobject value) {
  Place& place = places_.emplace_back();
  place.view = view_of(env, value);
  Layout& layout = place.view.layout;
  if (!countable(layout)) {
    throw Error(ErrorKind::Input, "input " + std::to_string(index) + " is too large");
  }
  place.tensor.emplace(
      static_cast<executorch::aten::ScalarType>(layout.scalar_type),
      static_cast<ssize_t>(layout.sizes.size()),
      layout.sizes.data(),
      place.view.data,
      layout.dim_order.data());
  list_[index] = et::EValue(EtTensor(&*place.tensor));
}

namespace {

/// Copy a result to the memory of a Tensor.
void copy_to(JNIEnv* env, size_t index, const EtTensor& from, jobject to) {
  const View view = view_of(env, to);
  if (const Layout found = layout_of(from); found != view.layout) {
    throw Error(
        ErrorKind::Layout,
        "output " + std::to_string(index) + " is " + blobstore::to_string(found) + ", and the tensor for it is " +
            blobstore::to_string(view.layout) +
            (found.sizes == view.layout.sizes ? ", or has another order of dimensions" : ""));
  }
  if (view.nbytes != 0) {
    std::memcpy(view.data, from.const_data_ptr(), view.nbytes);
  }
}

Local<> value_to_java(JNIEnv* env, const et::EValue& value) {
  if (value.isTensor()) {
    return copy_to_java(env, value.toTensor()).tensor;
  }
  if (value.isInt()) {
    const auto number = static_cast<jlong>(value.toInt());
    return {env, env->CallStaticObjectMethod(classes.long_, classes.make_long, number)};
  }
  if (value.isDouble()) {
    const jdouble number = value.toDouble();
    return {env, env->CallStaticObjectMethod(classes.double_, classes.make_double, number)};
  }
  if (value.isBool()) {
    const auto flag = static_cast<jboolean>(value.toBool());
    return {env, env->CallStaticObjectMethod(classes.boolean, classes.make_boolean, flag)};
  }
  if (value.isString()) {
    const auto chars = value.toString();
    return {env, to_java(env, std::string(chars.data(), chars.size())).give()};
  }
  return {env, nullptr};
}

} // namespace

Local<jobjectArray> copy_to_java(JNIEnv* env, const Outputs& outputs, jobjectArray into) {
  const auto given = static_cast<size_t>(into == nullptr ? 0 : env->GetArrayLength(into));
  Local<jobjectArray> array(
      env, checked(env, env->NewObjectArray(static_cast<jsize>(outputs.size()), classes.object, nullptr)));
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto at = static_cast<jsize>(i);
    Local<> made(env, i < given ? checked(env, env->GetObjectArrayElement(into, at)) : nullptr);
    if (made) {
      if (!outputs[i].isTensor()) {
        throw Error(ErrorKind::Layout, "output " + std::to_string(i) + " is no tensor, and one was given for it");
      }
      copy_to(env, i, outputs[i].toTensor(), made.get());
      env->SetObjectArrayElement(array.get(), at, made.get());
    } else {
      const Local<> value = value_to_java(env, outputs[i]);
      check(env);
      env->SetObjectArrayElement(array.get(), at, value.get());
    }
    check(env);
  }
  return array;
}

} // namespace blobstore::java
