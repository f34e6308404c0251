// How a function of C++ becomes one of `Native`: the types of its arguments and of its result say what they are in
// Java.
#pragma once

#include <functional>
#include <string_view>
#include <tuple>

#include "convert.h"

namespace blobstore::java {

/// How a type crosses the border. `Java` is its type in JNI and `signature` what JNI calls that. A type that Java
/// passes has `from`, one that Java gets has `to`. This is that of any class without its own one: an object of the
/// library that Java has a share in, and that functions take by reference.
template <typename T, typename = void>
struct Crossing {
  using Java = jlong;
  static std::string signature() { return "J"; }
  static T& from(JNIEnv*, jlong handle) { return object<T>(handle); }
};

/// A share of an object of the library; 0 is none.
template <typename T>
struct Crossing<std::shared_ptr<T>> {
  using Java = jlong;
  static std::string signature() { return "J"; }
  static std::shared_ptr<T> from(JNIEnv*, jlong handle) { return shared<T>(handle); }
  static jlong to(JNIEnv*, std::shared_ptr<T> held) { return held == nullptr ? 0 : share(std::move(held)); }
};
template <typename T>
struct Crossing<std::unique_ptr<T>> : Crossing<std::shared_ptr<T>> {};

// Numbers

template <typename T, typename Number, char letter>
struct NumberCrossing {
  using Java = Number;
  static std::string signature() { return std::string(1, letter); }
  static T from(JNIEnv*, Number number) { return static_cast<T>(number); }
  static Number to(JNIEnv*, T number) { return static_cast<Number>(number); }
};
template <>
struct Crossing<bool> : NumberCrossing<bool, jboolean, 'Z'> {};
template <>
struct Crossing<double> : NumberCrossing<double, jdouble, 'D'> {};
template <typename T>
struct Crossing<T, std::enable_if_t<std::is_integral_v<T> && sizeof(T) == sizeof(jlong)>>
    : NumberCrossing<T, jlong, 'J'> {};
template <typename T>
struct Crossing<T, std::enable_if_t<std::is_enum_v<T> || (std::is_integral_v<T> && sizeof(T) <= sizeof(jint))>>
    : NumberCrossing<T, jint, 'I'> {};
template <>
struct Crossing<Updated> : NumberCrossing<Updated, jlong, 'J'> {}; // the generation

template <>
struct Crossing<std::vector<double>> {
  using Java = jdoubleArray;
  static std::string signature() { return "[D"; }
  static std::vector<double> from(JNIEnv* env, jdoubleArray numbers) {
    std::vector<double> out(static_cast<size_t>(env->GetArrayLength(numbers)));
    env->GetDoubleArrayRegion(numbers, 0, static_cast<jsize>(out.size()), out.data());
    check(env);
    return out;
  }
};
template <typename T>
struct Crossing<std::vector<T>, std::enable_if_t<std::is_integral_v<T> && sizeof(T) == sizeof(jlong)>> {
  using Java = jlongArray;
  static std::string signature() { return "[J"; }
  static Local<jlongArray> to(JNIEnv* env, const std::vector<T>& numbers) {
    const auto size = static_cast<jsize>(numbers.size());
    const std::vector<jlong> longs(numbers.begin(), numbers.end());
    Local<jlongArray> array(env, checked(env, env->NewLongArray(size)));
    env->SetLongArrayRegion(array.get(), 0, size, longs.data());
    check(env);
    return array;
  }
};
template <typename T>
struct Crossing<std::vector<T>, std::enable_if_t<std::is_integral_v<T> && sizeof(T) <= sizeof(jint)>> {
  static std::string signature() { return "[I"; }
  static Local<jintArray> to(JNIEnv* env, const std::vector<T>& numbers) {
    return to_java(env, std::vector<jint>(numbers.begin(), numbers.end()));
  }
};
template <typename T>
struct Crossing<std::vector<std::shared_ptr<T>>> {
  using Java = jlongArray;
  static std::string signature() { return "[J"; }
  static std::vector<std::shared_ptr<T>> from(JNIEnv* env, jlongArray handles) {
    std::vector<jlong> all(static_cast<size_t>(env->GetArrayLength(handles)));
    env->GetLongArrayRegion(handles, 0, static_cast<jsize>(all.size()), all.data());
    check(env);
    std::vector<std::shared_ptr<T>> out;
    for (const jlong handle : all) {
      out.push_back(shared<T>(handle));
    }
    return out;
  }
};

/// An OptionalDouble of Java.
template <>
struct Crossing<std::optional<double>> {
  using Java = jobject;
  static std::string signature() { return "Ljava/util/OptionalDouble;"; }
  static std::optional<double> from(JNIEnv* env, jobject number);
  static Local<> to(JNIEnv* env, const std::optional<double>& number);
};

// Texts

template <>
struct Crossing<std::string> {
  using Java = jstring;
  static std::string class_name() { return "java/lang/String"; }
  static std::string signature() { return "Ljava/lang/String;"; }
  static std::string from(JNIEnv* env, jstring text) { return to_string(env, text); }
  static Local<jstring> to(JNIEnv* env, const std::string& text) { return to_java(env, text); }
};
template <>
struct Crossing<std::string_view> : Crossing<std::string> {};

/// A text of Java as a path, and an array of them.
struct Path {
  std::string text;
};
struct Paths {
  std::vector<std::string> all;
};
template <>
struct Crossing<Path> : Crossing<std::string> {
  static Path from(JNIEnv* env, jstring text) { return {to_path(env, text)}; }
};

// Objects

/// A struct that Java has a class for. Specialized with the `name` of that, and `fields`, which its constructor takes.
template <typename T>
struct Mirror;

/// What JNI takes and returns for a number or a reference.
template <typename T>
T raw(T number) {
  return number;
}
template <typename T>
T raw(const Local<T>& reference) {
  return reference.get();
}
template <typename T>
T give(T number) {
  return number;
}
template <typename T>
T give(Local<T> reference) {
  return reference.give();
}

template <typename T>
struct Crossing<T, std::void_t<decltype(Mirror<T>::name)>> {
  using Java = jobject;
  static std::string class_name() { return std::string("dev/blobstore/") + Mirror<T>::name; }
  static std::string signature() { return "L" + class_name() + ";"; }
  static Local<> to(JNIEnv* env, const T& value) {
    return std::apply([&](const auto&... fields) { return make(env, fields...); }, Mirror<T>::fields(value));
  }

 private:
  template <typename... Fields>
  static Local<> make(JNIEnv* env, const Fields&... fields) {
    const Local<jclass> type(env, checked(env, env->FindClass(class_name().c_str())));
    const std::string constructor_signature = "(" + (Crossing<Fields>::signature() + ... + std::string(")V"));
    const jmethodID constructor = checked(env, env->GetMethodID(type.get(), "<init>", constructor_signature.c_str()));
    const std::tuple<decltype(Crossing<Fields>::to(env, fields))...> made(Crossing<Fields>::to(env, fields)...);
    const auto construct = [&](const auto&... each) { return env->NewObject(type.get(), constructor, raw(each)...); };
    return {env, checked(env, std::apply(construct, made))};
  }
};

/// An array of texts or of structs.
template <typename T>
struct Crossing<std::vector<T>, std::void_t<decltype(Crossing<T>::class_name)>> {
  using Java = jobjectArray;
  static std::string signature() { return "[" + Crossing<T>::signature(); }
  static std::vector<T> from(JNIEnv* env, jobjectArray texts) { return to_strings(env, texts, to_string); }
  static Local<jobjectArray> to(JNIEnv* env, const std::vector<T>& values) {
    const Local<jclass> type(env, checked(env, env->FindClass(Crossing<T>::class_name().c_str())));
    Local<jobjectArray> array(
        env, checked(env, env->NewObjectArray(static_cast<jsize>(values.size()), type.get(), nullptr)));
    for (size_t i = 0; i < values.size(); ++i) {
      const auto made = Crossing<T>::to(env, values[i]);
      env->SetObjectArrayElement(array.get(), static_cast<jsize>(i), made.get());
      check(env);
    }
    return array;
  }
};
template <>
struct Crossing<Paths> : Crossing<std::vector<std::string>> {
  static Paths from(JNIEnv* env, jobjectArray texts) { return {to_strings(env, texts, to_path)}; }
};

/// Null for none.
template <typename T>
struct Crossing<std::optional<T>, std::void_t<typename Crossing<T>::Java>> {
  using Java = typename Crossing<T>::Java;
  static std::string signature() { return Crossing<T>::signature(); }
  static std::optional<T> from(JNIEnv* env, Java value) {
    return value == nullptr ? std::nullopt : std::optional<T>(Crossing<T>::from(env, value));
  }
  static Local<Java> to(JNIEnv* env, const std::optional<T>& value) {
    return value ? Crossing<T>::to(env, *value) : Local<Java>(env, nullptr);
  }
};

// Tensors and values

template <>
struct Crossing<StateDict> {
  using Java = jobject;
  static std::string signature() { return "Ldev/blobstore/Named;"; }
  static StateDict from(JNIEnv* env, jobject named) { return to_state_dict(env, named); }
};
template <>
struct Crossing<View> {
  using Java = jobject;
  static std::string signature() { return "Ldev/blobstore/Tensor;"; }
  static View from(JNIEnv* env, jobject tensor) { return view_of(env, tensor); }
};
template <>
struct Crossing<NewTensor> : Crossing<View> {
  static Local<> to(JNIEnv*, NewTensor made) { return std::move(made.tensor); }
};
/// Inputs and outputs, which the functions take and make.
template <>
struct Crossing<Local<jobjectArray>> {
  using Java = jobjectArray;
  static std::string signature() { return "[Ljava/lang/Object;"; }
  static Local<jobjectArray> to(JNIEnv*, Local<jobjectArray> values) { return values; }
};
template <>
struct Crossing<jobjectArray> : Crossing<Local<jobjectArray>> {
  static jobjectArray from(JNIEnv*, jobjectArray values) { return values; }
};

/// Tensors for results, or null.
struct Results {
  jobjectArray array;
};
template <>
struct Crossing<Results> {
  using Java = jobjectArray;
  static std::string signature() { return "[Ldev/blobstore/Tensor;"; }
  static Results from(JNIEnv*, jobjectArray array) { return {array}; }
};

// Functions

/// One of `Native`.
struct Row {
  const char* name;
  std::string signature;
  void* pointer;
};

template <auto function, typename Result, typename... Arguments>
auto call(JNIEnv* env, jclass, typename Crossing<std::decay_t<Arguments>>::Java... values) {
  return guarded(env, [&] {
    const auto run = [&](auto&&... arguments) -> Result {
      if constexpr (std::is_invocable_v<decltype(function), JNIEnv*, Arguments...>) {
        return function(env, std::forward<decltype(arguments)>(arguments)...);
      } else {
        return std::invoke(function, std::forward<decltype(arguments)>(arguments)...);
      }
    };
    if constexpr (std::is_void_v<Result>) {
      run(Crossing<std::decay_t<Arguments>>::from(env, values)...);
    } else {
      return give(
          Crossing<std::decay_t<Result>>::to(env, run(Crossing<std::decay_t<Arguments>>::from(env, values)...)));
    }
  });
}

template <auto function, typename Result, typename... Arguments>
Row row_of(const char* name) {
  std::string result = "V";
  if constexpr (!std::is_void_v<Result>) {
    result = Crossing<std::decay_t<Result>>::signature();
  }
  return {
      name,
      "(" + (Crossing<std::decay_t<Arguments>>::signature() + ... + (")" + result)),
      reinterpret_cast<void*>(&call<function, Result, Arguments...>)};
}

template <auto function, typename Result, typename... Arguments>
Row row_like(const char* name, Result (*)(Arguments...)) {
  return row_of<function, Result, Arguments...>(name);
}
template <auto function, typename Result, typename... Arguments>
Row row_like(const char* name, Result (*)(JNIEnv*, Arguments...)) {
  return row_of<function, Result, Arguments...>(name);
}
template <auto function, typename Result, typename T, typename... Arguments>
Row row_like(const char* name, Result (T::*)(Arguments...)) {
  return row_of<function, Result, T&, Arguments...>(name);
}
template <auto function, typename Result, typename T, typename... Arguments>
Row row_like(const char* name, Result (T::*)(Arguments...) const) {
  return row_of<function, Result, T&, Arguments...>(name);
}

/// The function of `Native` with this name, which calls a function or a method of an object. A function may take the
/// environment first.
template <auto function>
Row row(const char* name) {
  return row_like<function>(name, function);
}

std::vector<Row> adapter_rows();
std::vector<Row> cache_rows();
std::vector<Row> packed_rows();
std::vector<Row> program_rows();
std::vector<Row> release_rows();
std::vector<Row> request_rows();
std::vector<Row> tensor_rows();
std::vector<Row> training_rows();

} // namespace blobstore::java
