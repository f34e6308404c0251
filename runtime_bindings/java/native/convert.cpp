#include "convert.h"

#include <algorithm>
#include <cstring>

#include <executorch/runtime/core/exec_aten/util/tensor_util.h>

#include "logical/dim_order.h"
#include "text.h"

namespace blobstore::java {

namespace et = executorch::runtime;
using EtTensor = executorch::aten::Tensor;

namespace {

/// What every call needs, found when the library is loaded. References to classes are global, and never given back.
struct Classes {
  jclass object = nullptr;
  jclass string = nullptr;
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

[[noreturn]] void throw_deep(size_t rank) {
  throw Error(
      ErrorKind::UnsupportedData,
      "a tensor has at most " + std::to_string(et::kTensorDimensionLimit) + " dimensions, not " + std::to_string(rank));
}

[[noreturn]] void throw_input(size_t index, const std::string& reason) {
  throw Error(ErrorKind::Input, "input " + std::to_string(index) + " " + reason);
}

} // namespace

void find_classes(JNIEnv* env) {
  Classes found;
  found.object = find(env, "java/lang/Object");
  found.string = find(env, "java/lang/String");
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
  found.data = checked(env, env->GetFieldID(found.tensor, "data", "Ljava/nio/ByteBuffer;"));
  found.type = checked(env, env->GetFieldID(found.tensor, "type", "I"));
  found.sizes = checked(env, env->GetFieldID(found.tensor, "sizes", "[I"));
  found.order = checked(env, env->GetFieldID(found.tensor, "order", "[I"));
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
  if (text == nullptr) {
    throw_java(env, "java/lang/NullPointerException", "a string is null");
  }
  std::u16string copy(static_cast<size_t>(env->GetStringLength(text)), u'\0');
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

namespace {

template <typename Each>
std::vector<std::string> all_of(JNIEnv* env, jobjectArray texts, Each each) {
  if (texts == nullptr) {
    throw_java(env, "java/lang/NullPointerException", "an array is null");
  }
  const jsize count = env->GetArrayLength(texts);
  std::vector<std::string> out;
  out.reserve(static_cast<size_t>(count));
  for (jsize i = 0; i < count; ++i) {
    const Local<jstring> one(env, static_cast<jstring>(checked(env, env->GetObjectArrayElement(texts, i))));
    out.push_back(each(env, one.get()));
  }
  return out;
}

} // namespace

std::vector<std::string> to_strings(JNIEnv* env, jobjectArray texts) {
  return all_of(env, texts, to_string);
}

std::vector<std::string> to_paths(JNIEnv* env, jobjectArray texts) {
  return all_of(env, texts, to_path);
}

std::vector<double> to_doubles(JNIEnv* env, jdoubleArray numbers) {
  std::vector<double> out(static_cast<size_t>(env->GetArrayLength(numbers)));
  env->GetDoubleArrayRegion(numbers, 0, static_cast<jsize>(out.size()), out.data());
  check(env);
  return out;
}

Local<jstring> to_java(JNIEnv* env, const std::string& text) {
  const std::u16string wide = to_utf16(text);
  return {
      env, checked(env, env->NewString(reinterpret_cast<const jchar*>(wide.data()), static_cast<jsize>(wide.size())))};
}

Local<jobjectArray> to_java(JNIEnv* env, const std::vector<std::string>& texts) {
  Local<jobjectArray> array(
      env, checked(env, env->NewObjectArray(static_cast<jsize>(texts.size()), classes.string, nullptr)));
  for (size_t i = 0; i < texts.size(); ++i) {
    const Local<jstring> text = to_java(env, texts[i]);
    env->SetObjectArrayElement(array.get(), static_cast<jsize>(i), text.get());
    check(env);
  }
  return array;
}

Local<jlongArray> to_java(JNIEnv* env, const std::vector<jlong>& numbers) {
  const auto size = static_cast<jsize>(numbers.size());
  Local<jlongArray> array(env, checked(env, env->NewLongArray(size)));
  env->SetLongArrayRegion(array.get(), 0, size, numbers.data());
  check(env);
  return array;
}

Local<jintArray> to_java(JNIEnv* env, const std::vector<jint>& numbers) {
  const auto size = static_cast<jsize>(numbers.size());
  Local<jintArray> array(env, checked(env, env->NewIntArray(size)));
  env->SetIntArrayRegion(array.get(), 0, size, numbers.data());
  check(env);
  return array;
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

Local<> copy_to_java(JNIEnv* env, const EtTensor& tensor) {
  NewTensor made = new_tensor(env, internal::layout_of(tensor));
  if (const size_t size = tensor.nbytes(); size != 0) {
    std::memcpy(made.data, tensor.const_data_ptr(), size);
  }
  return std::move(made.tensor);
}

Layout View::layout() const {
  return {scalar_type, {sizes.begin(), sizes.begin() + rank}, {dim_order.begin(), dim_order.begin() + rank}};
}

View view_of(JNIEnv* env, jobject tensor) {
  if (tensor == nullptr) {
    throw_java(env, "java/lang/NullPointerException", "a tensor is null");
  }
  View view;
  view.scalar_type = static_cast<int8_t>(env->GetIntField(tensor, classes.type));
  const Local<jintArray> sizes(env, static_cast<jintArray>(env->GetObjectField(tensor, classes.sizes)));
  const Local<jintArray> order(env, static_cast<jintArray>(env->GetObjectField(tensor, classes.order)));
  const Local<> data(env, env->GetObjectField(tensor, classes.data));
  const jsize rank = env->GetArrayLength(sizes.get());
  if (static_cast<size_t>(rank) > view.sizes.size()) {
    throw_deep(static_cast<size_t>(rank));
  }
  view.rank = static_cast<uint8_t>(rank);
  std::array<jint, et::kTensorDimensionLimit> dims = {};
  static_assert(sizeof(jint) == sizeof(int32_t));
  env->GetIntArrayRegion(sizes.get(), 0, rank, reinterpret_cast<jint*>(view.sizes.data()));
  check(env);
  if (order) {
    env->GetIntArrayRegion(order.get(), 0, rank, dims.data());
    check(env);
  }
  for (uint8_t i = 0; i < view.rank; ++i) {
    view.dim_order[i] = order ? static_cast<uint8_t>(dims[i]) : i;
  }
  view.data = env->GetDirectBufferAddress(data.get());
  view.nbytes = static_cast<size_t>(env->GetDirectBufferCapacity(data.get()));
  // the constructor in Java compared the two, so this is about memory that was not made by it
  size_t nbytes = item_size(view.scalar_type);
  for (uint8_t i = 0; i < view.rank; ++i) {
    nbytes *= static_cast<size_t>(view.sizes[i]);
  }
  if (nbytes != view.nbytes || (view.data == nullptr && nbytes != 0)) {
    throw Error(ErrorKind::UnsupportedData, "the memory of a tensor is not that of a direct buffer");
  }
  if (view.nbytes != 0 && reinterpret_cast<uintptr_t>(view.data) % item_size(view.scalar_type) != 0) {
    throw Error(
        ErrorKind::UnsupportedData,
        "the buffer of " + blobstore::to_string(view.layout()) + " begins at an address that is no multiple of " +
            std::to_string(item_size(view.scalar_type)) + "; it is a slice of another one");
  }
  return view;
}

NamedTensors::NamedTensors(JNIEnv* env, jobjectArray names, jobjectArray tensors) : names_(to_strings(env, names)) {
  for (size_t i = 0; i < names_.size(); ++i) {
    const Local<> tensor(env, checked(env, env->GetObjectArrayElement(tensors, static_cast<jsize>(i))));
    views_.push_back(view_of(env, tensor.get()));
  }
}

StateDict NamedTensors::state_dict() const {
  StateDict out;
  for (size_t i = 0; i < names_.size(); ++i) {
    const View& view = views_[i];
    if (!executorch::aten::safe_numel(view.sizes.data(), view.rank).ok()) {
      throw Error(ErrorKind::UnsupportedData, "'" + names_[i] + "' is too large");
    }
    out[names_[i]] = executorch::extension::make_tensor_ptr(
        {view.sizes.begin(), view.sizes.begin() + view.rank},
        view.data,
        {view.dim_order.begin(), view.dim_order.begin() + view.rank},
        {},
        static_cast<executorch::aten::ScalarType>(view.scalar_type));
  }
  return out;
}

Inputs::Inputs(JNIEnv* env, jobjectArray values, const et::MethodMeta& method) {
  if (values == nullptr) {
    throw_java(env, "java/lang/NullPointerException", "the array of inputs is null");
  }
  const auto count = static_cast<size_t>(env->GetArrayLength(values));
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
  View& view = place.view;
  if (!executorch::aten::safe_numel(view.sizes.data(), view.rank).ok()) {
    throw_input(index, "is too large");
  }
  place.tensor.emplace(
      static_cast<executorch::aten::ScalarType>(view.scalar_type),
      view.rank,
      view.sizes.data(),
      view.data,
      view.dim_order.data());
  list_[index] = et::EValue(EtTensor(&*place.tensor));
}

namespace {

/// Copy a result to the memory of a Tensor.
void copy_to(JNIEnv* env, size_t index, const EtTensor& from, jobject to) {
  const View view = view_of(env, to);
  if (const Layout found = internal::layout_of(from); found != view.layout()) {
    throw Error(
        ErrorKind::Layout,
        "output " + std::to_string(index) + " is " + blobstore::to_string(found) + ", and the tensor for it is " +
            blobstore::to_string(view.layout()) +
            (found.sizes == view.layout().sizes ? ", or has another order of dimensions" : ""));
  }
  if (view.nbytes != 0) {
    std::memcpy(view.data, from.const_data_ptr(), view.nbytes);
  }
}

Local<> value_to_java(JNIEnv* env, const et::EValue& value) {
  if (value.isTensor()) {
    return copy_to_java(env, value.toTensor());
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
