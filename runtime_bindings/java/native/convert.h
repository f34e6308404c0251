// Between Java's types and those of the library. Each function that takes an environment may leave a Java exception; it
// then throws Pending, which `guarded` takes at the border.
#pragma once

#include <jni.h>

#include <array>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/runtime/core/evalue.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/tensor_dimension_limit.h>
#include <executorch/runtime/executor/method_meta.h>

#include <blobstore/error.h>
#include <blobstore/layout.h>
#include <blobstore/program.h>
#include <blobstore/tensors.h>

namespace blobstore::java {

/// A Java exception is pending; the function returns to Java.
struct Pending {};

/// @throws Pending: the last call of Java left an exception.
inline void check(JNIEnv* env) {
  if (env->ExceptionCheck() != JNI_FALSE) {
    throw Pending();
  }
}

/// What a call of Java returned, if it left no exception.
template <typename T>
T checked(JNIEnv* env, T value) {
  check(env);
  return value;
}

/// A reference of this call, given back with the object: a call has room for few.
template <typename T = jobject>
class Local {
 public:
  Local(JNIEnv* env, T reference) : env_(env), reference_(reference) {}
  ~Local() {
    if (reference_ != nullptr) {
      env_->DeleteLocalRef(reference_);
    }
  }
  Local(Local&& other) noexcept : env_(other.env_), reference_(std::exchange(other.reference_, nullptr)) {}
  Local(const Local&) = delete;
  Local& operator=(const Local&) = delete;

  T get() const { return reference_; }
  /// For the caller in Java.
  T give() { return std::exchange(reference_, nullptr); }
  explicit operator bool() const { return reference_ != nullptr; }

 private:
  JNIEnv* env_;
  T reference_;
};

/// Leave a Java exception of a class by its name, and throw Pending.
[[noreturn]] void throw_java(JNIEnv* env, const char* name, const char* message);

/// Leave the Java exception for the C++ exception that is being handled.
void leave_exception(JNIEnv* env) noexcept;

/// Call a function at the border: any C++ exception becomes one of Java, and the value is then 0.
template <typename Function>
auto guarded(JNIEnv* env, Function&& function) noexcept -> decltype(function()) {
  try {
    return function();
  } catch (...) {
    leave_exception(env);
  }
  if constexpr (!std::is_void_v<decltype(function())>) {
    return {};
  }
}

// Objects of the library that Java has a share in.

template <typename T>
jlong share(std::shared_ptr<T> object) {
  return reinterpret_cast<jlong>(new std::shared_ptr<void>(std::move(object)));
}

/// The object of a share that was made of the same T; null for none.
template <typename T>
std::shared_ptr<T> shared(jlong handle) {
  const auto* held = reinterpret_cast<const std::shared_ptr<void>*>(handle);
  return held == nullptr ? nullptr : std::static_pointer_cast<T>(*held);
}

template <typename T>
T& object(jlong handle) {
  return *static_cast<T*>(reinterpret_cast<const std::shared_ptr<void>*>(handle)->get());
}

// Strings and arrays. Java's strings are UTF-16, the library's UTF-8; bytes that are not become U+FFFD.

/// @throws Error UnsupportedData: half of a surrogate pair. Leaves NullPointerException for null.
std::string to_string(JNIEnv* env, jstring text);
/// As above, for a path. @throws Error FileAccess: it has a NUL, where the system would end it.
std::string to_path(JNIEnv* env, jstring text);
std::vector<std::string> to_strings(JNIEnv* env, jobjectArray texts);
std::vector<std::string> to_paths(JNIEnv* env, jobjectArray texts);
std::vector<double> to_doubles(JNIEnv* env, jdoubleArray numbers);

Local<jstring> to_java(JNIEnv* env, const std::string& text);
Local<jobjectArray> to_java(JNIEnv* env, const std::vector<std::string>& texts);
Local<jlongArray> to_java(JNIEnv* env, const std::vector<jlong>& numbers);
Local<jintArray> to_java(JNIEnv* env, const std::vector<jint>& numbers);

/// An argument that is null, for a text that is missing.
inline Local<jstring> to_java(JNIEnv* env, const std::optional<std::string>& text) {
  return text ? to_java(env, *text) : Local<jstring>(env, nullptr);
}

/// An array of objects of a class of this package, as an argument.
struct Objects {
  const char* type;
  jobjectArray array;
};

/// What a value is in Java: a number as it is, everything else as a reference of this call.
template <typename T>
auto argument(JNIEnv* env, const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return static_cast<jboolean>(value);
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<std::conditional_t<sizeof(T) == sizeof(jlong), jlong, jint>>(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<jdouble>(value);
  } else if constexpr (std::is_same_v<T, Objects>) {
    return value.array;
  } else {
    return to_java(env, value);
  }
}

/// The type of an argument in signatures.
template <typename T, typename Argument>
std::string type_of(const T& value, const Argument&) {
  if constexpr (std::is_same_v<T, Objects>) {
    return std::string("[Ldev/blobstore/") + value.type + ";";
  } else {
    return std::is_same_v<Argument, jboolean>           ? "Z"
        : std::is_same_v<Argument, jint>                ? "I"
        : std::is_same_v<Argument, jlong>               ? "J"
        : std::is_same_v<Argument, jdouble>             ? "D"
        : std::is_same_v<Argument, Local<jintArray>>    ? "[I"
        : std::is_same_v<Argument, Local<jlongArray>>   ? "[J"
        : std::is_same_v<Argument, Local<jobjectArray>> ? "[Ljava/lang/String;"
                                                        : "Ljava/lang/String;";
  }
}

template <typename T>
T passed(T number) {
  return number;
}
template <typename T>
T passed(const Local<T>& reference) {
  return reference.get();
}

/// A new object of a class of this package, such as "ValueInfo". Its constructor takes what the values are in Java.
template <typename... Values>
Local<> make(JNIEnv* env, const char* name, const Values&... values) {
  const Local<jclass> type(env, checked(env, env->FindClass((std::string("dev/blobstore/") + name).c_str())));
  const std::tuple<decltype(argument(env, values))...> arguments(argument(env, values)...);
  const auto construct = [&](const auto&... each) -> Local<> {
    const std::string signature = "(" + (type_of(values, each) + ... + std::string(")V"));
    const jmethodID constructor = checked(env, env->GetMethodID(type.get(), "<init>", signature.c_str()));
    return {env, checked(env, env->NewObject(type.get(), constructor, passed(each)...))};
  };
  return std::apply(construct, arguments);
}

/// An array of objects of a class of this package, each of which `each(value)` makes.
template <typename Values, typename Each>
Local<jobjectArray> make_array(JNIEnv* env, const char* name, const Values& values, const Each& each) {
  const Local<jclass> type(env, checked(env, env->FindClass((std::string("dev/blobstore/") + name).c_str())));
  Local<jobjectArray> array(
      env, checked(env, env->NewObjectArray(static_cast<jsize>(values.size()), type.get(), nullptr)));
  jsize index = 0;
  for (const auto& value : values) {
    const Local<> made = each(value);
    env->SetObjectArrayElement(array.get(), index++, made.get());
    check(env);
  }
  return array;
}

// Tensors

/// A new Tensor with memory of its own, which is not filled, and where that is.
struct NewTensor {
  Local<> tensor;
  void* data;
};
/// @throws Error UnsupportedData: its elements are of an unknown type, or it has more dimensions than ExecuTorch runs.
NewTensor new_tensor(JNIEnv* env, const Layout& layout);

/// A Tensor with a copy of the bytes.
Local<> copy_to_java(JNIEnv* env, const executorch::aten::Tensor& tensor);

/// What a Tensor of Java refers to. Valid as long as Java can reach the Tensor.
struct View {
  int8_t scalar_type = 0;
  uint8_t rank = 0;
  std::array<int32_t, executorch::runtime::kTensorDimensionLimit> sizes = {};
  std::array<uint8_t, executorch::runtime::kTensorDimensionLimit> dim_order = {};
  void* data = nullptr;
  size_t nbytes = 0;

  Layout layout() const;
};
/// @throws Error UnsupportedData: it has more dimensions than ExecuTorch runs, or memory that cannot be used.
View view_of(JNIEnv* env, jobject tensor);

/// Named tensors of Java during a call. The array keeps their memory, so nothing else may change it. There is no
/// reference to each one, because a call has room for few.
class NamedTensors {
 public:
  NamedTensors(JNIEnv* env, jobjectArray names, jobjectArray tensors);

  const std::vector<std::string>& names() const { return names_; }
  const std::vector<View>& views() const { return views_; }
  StateDict state_dict() const;

 private:
  std::vector<std::string> names_;
  std::vector<View> views_;
};

/// The inputs of a call, during it. The array keeps the memory of tensors, so nothing else may change it.
class Inputs {
 public:
  Inputs(JNIEnv* env, jobjectArray values, const executorch::runtime::MethodMeta& method);

  const std::vector<executorch::runtime::EValue>& list() const { return list_; }

 private:
  struct Place { // what an EValue refers to, at an address that stays
    View view;
    std::optional<executorch::runtime::etensor::TensorImpl> tensor;
  };

  void take_tensor(JNIEnv* env, size_t index, jobject value);

  std::vector<Place> places_;
  std::vector<executorch::runtime::EValue> list_;
};

/// Objects of Java with copies of the outputs.
///
/// @param into null, or Tensors that results are copied to, each of which may be null.
/// @throws Error Layout: one of them differs from its result; those before it were written to.
Local<jobjectArray> copy_to_java(JNIEnv* env, const Outputs& outputs, jobjectArray into = nullptr);

// The functions of each file, for `Native`.

void add_adapters(std::vector<JNINativeMethod>& functions);
void add_cache(std::vector<JNINativeMethod>& functions);
void add_packed(std::vector<JNINativeMethod>& functions);
void add_programs(std::vector<JNINativeMethod>& functions);
void add_releases(std::vector<JNINativeMethod>& functions);
void add_requests(std::vector<JNINativeMethod>& functions);
void add_tensors(std::vector<JNINativeMethod>& functions);
void add_training(std::vector<JNINativeMethod>& functions);

/// Find the classes that calls need often, once. @throws Pending.
void find_classes(JNIEnv* env);

/// A row of these lists. JNI takes its texts without const and never writes to them.
template <typename Function>
JNINativeMethod function(const char* name, const char* signature, Function* pointer) {
  return {const_cast<char*>(name), const_cast<char*>(signature), reinterpret_cast<void*>(pointer)};
}

} // namespace blobstore::java
