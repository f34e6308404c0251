// Between Java's types and those of the library. Each function that takes an environment may leave a Java exception; it
// then throws Pending, which `guarded` takes at the border.
#pragma once

#include <jni.h>

#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
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

/// The argument, unless it is null: that leaves NullPointerException.
template <typename T>
T not_null(JNIEnv* env, T reference, const char* message) {
  if (reference == nullptr) {
    throw_java(env, "java/lang/NullPointerException", message);
  }
  return reference;
}

/// @throws Error UnsupportedData: half of a surrogate pair. Leaves NullPointerException for null.
std::string to_string(JNIEnv* env, jstring text);
/// As above, for a path. @throws Error FileAccess: it has a NUL, where the system would end it.
std::string to_path(JNIEnv* env, jstring text);

/// What `each` makes of every text.
template <typename Each>
std::vector<std::string> to_strings(JNIEnv* env, jobjectArray texts, const Each& each) {
  const jsize count = env->GetArrayLength(not_null(env, texts, "an array is null"));
  std::vector<std::string> out;
  out.reserve(static_cast<size_t>(count));
  for (jsize i = 0; i < count; ++i) {
    const Local<jstring> one(env, static_cast<jstring>(checked(env, env->GetObjectArrayElement(texts, i))));
    out.push_back(each(env, one.get()));
  }
  return out;
}

Local<jstring> to_java(JNIEnv* env, const std::string& text);
Local<jintArray> to_java(JNIEnv* env, const std::vector<jint>& numbers);

// Tensors

/// A new Tensor with memory of its own, which is not filled, and where that is.
struct NewTensor {
  Local<> tensor;
  void* data;
};
/// @throws Error UnsupportedData: its elements are of an unknown type, or it has more dimensions than ExecuTorch runs.
NewTensor new_tensor(JNIEnv* env, const Layout& layout);

/// A tensor of ExecuTorch may have no dim order, which is row-major.
Layout layout_of(const executorch::aten::Tensor& tensor);

/// One with a copy of the bytes.
NewTensor copy_to_java(JNIEnv* env, const executorch::aten::Tensor& tensor);

/// What a Tensor of Java refers to. Valid as long as Java can reach the Tensor.
struct View {
  Layout layout;
  void* data = nullptr;
  size_t nbytes = 0;
};
/// @throws Error UnsupportedData: it has more dimensions than ExecuTorch runs, or memory that cannot be used.
View view_of(JNIEnv* env, jobject tensor);

/// The tensors of a Named of Java. They refer to its memory, so they are valid during the call that it was passed to.
/// There is no reference to each one, because a call has room for few.
StateDict to_state_dict(JNIEnv* env, jobject named);

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

/// Find the classes that calls need often, once. @throws Pending.
void find_classes(JNIEnv* env);

} // namespace blobstore::java
