// A device without exceptions: compiled with -fno-exceptions -fno-rtti, it opens, runs, updates, trains and publishes.
//
//   facade_test TRAIN.pte SERVE.pte WEIGHTS.ptd DELTA.ptd
//
// The programs are those of examples/xor.py. Prints what SERVE.pte computes before the update of "hidden.weight" to
// zeros, after it, after training and publishing, and on a new cache with the delta that was saved.

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <executorch/extension/tensor/tensor.h>

#include <blobstore/nothrow.h>

#include "check.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there
using executorch::extension::make_tensor_ptr;

/// The value, or an end with the error.
template <typename T>
T need(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "unexpected: %s\n", result.error().what());
    std::exit(1);
  }
  return std::move(result).get();
}

executorch::extension::TensorPtr inputs() {
  return make_tensor_ptr({4, 2}, {0.0f, 0.0f, 0.0f, 1.0f, 1.0f, 0.0f, 1.0f, 1.0f});
}

executorch::extension::TensorPtr labels() {
  return make_tensor_ptr({4}, {int64_t{0}, int64_t{1}, int64_t{1}, int64_t{0}});
}

void print_scores(Method& method) {
  const Outputs outputs = need(nothrow::execute(method, {inputs()}));
  const auto& scores = outputs[0].toTensor();
  for (ssize_t i = 0; i < scores.numel(); ++i) {
    std::printf(i == 0 ? "%.9g" : " %.9g", static_cast<double>(scores.const_data_ptr<float>()[i]));
  }
  std::printf("\n");
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 5);
  CHECK(std::string(version()).size() >= 5);
  const auto missing = nothrow::open({"/nowhere/weights.ptd"});
  CHECK(!missing.ok() && missing.error().kind() == ErrorKind::FileAccess && missing.error().number() == ENOENT);
  CHECK(missing.error().path() == "/nowhere/weights.ptd");
  CHECK(std::strncmp(missing.error().what(), "/nowhere/weights.ptd: ", 22) == 0);

  const std::shared_ptr<BlobCache> cache = need(nothrow::open({argv[3]}));
  CHECK(need(nothrow::verify(*cache)));
  const auto program = need(nothrow::load_program(argv[2], cache));
  const auto store = need(nothrow::open_packed(std::string(argv[4]) + ".packed"));
  CHECK(need(nothrow::list(*store)).empty() && need(nothrow::gc(*store)).empty());
  CHECK(nothrow::open_packed(argv[2]).error().kind() == ErrorKind::FileAccess);
  const auto unknown = nothrow::load_method(*program, "backward");
  CHECK(!unknown.ok() && unknown.error().kind() == ErrorKind::MethodNotFound);
  const auto method = need(nothrow::load_method(*program, "forward"));
  CHECK(nothrow::execute(*method, {}).error().kind() == ErrorKind::Input);
  CHECK(nothrow::forward(*program, {}).error().kind() == ErrorKind::Input);
  CHECK(need(nothrow::forward(*program, {inputs()})).size() == 1);
  print_scores(*method);
  need(nothrow::load_method(*need(nothrow::load_program(argv[2], cache, store)), "forward"));
  need(nothrow::open({argv[3]}, BlobCache::Mode::Private, nullptr, store));
  CHECK(need(nothrow::verify(*store)).size() == need(nothrow::stats(*store)).builds);

  const auto tensors = need(nothrow::logical_tensors(cache));
  CHECK(nothrow::at(*tensors, "hiden.weight").error().kind() == ErrorKind::KeyNotFound);
  CHECK(
      nothrow::update(*tensors, {{"hidden.weight", make_tensor_ptr({1}, {0.0f})}}).error().kind() == ErrorKind::Layout);
  CHECK(nothrow::load_adapter(*tensors, "/nowhere/adapter.ptd").error().kind() == ErrorKind::FileAccess);
  CHECK(cache->generation() == 0);
  const auto zeros = make_tensor_ptr({10, 2}, std::vector<float>(20));
  CHECK(need(nothrow::update(*tensors, {{"hidden.weight", zeros}})) == cache->generation());
  print_scores(*method);
  CHECK(nothrow::revert(*cache).ok() && need(nothrow::dirty(*cache)).empty());

  const std::string key = cache->blob(0).key;
  CHECK(need(nothrow::version(*cache, key)) <= cache->generation());
  CHECK(nothrow::version(*cache, "hiden").error().kind() == ErrorKind::KeyNotFound);
  CHECK(!need(nothrow::differs_from_file(*cache, key)));
  CHECK(nothrow::differs_from_file(*cache, "hiden").error().kind() == ErrorKind::KeyNotFound);
  CHECK(nothrow::recorded_digest(*cache, key).ok() && nothrow::file_digest(*cache, key).ok());
  CHECK(nothrow::file_digest(*cache, "hiden").error().kind() == ErrorKind::KeyNotFound);
  CHECK(nothrow::check_files(*cache).ok());
  CHECK(nothrow::needs(*program, "forward").ok() && nothrow::backends(*program, "forward").ok());
  CHECK(nothrow::needs(*program, "backward").error().kind() == ErrorKind::MethodNotFound);
  const size_t input_count = need(nothrow::method_meta(*program, "forward")).num_inputs();
  CHECK(need(nothrow::input_names(*program, "forward")).size() == input_count);
  CHECK(nothrow::input_names(*program, "backward").error().kind() == ErrorKind::MethodNotFound);
  CHECK(nothrow::backends(*program, "backward").error().kind() == ErrorKind::MethodNotFound);

  CHECK(nothrow::training_program(program).error().kind() == ErrorKind::Program);
  const auto training = need(nothrow::training_program(need(nothrow::load_program(argv[1], cache))));
  CHECK(!nothrow::sgd({-1.0}).ok());
  const auto optimizer = need(nothrow::sgd({0.5, 0.9}));
  for (int i = 0; i < 10; ++i) {
    CHECK(nothrow::step(*training, *optimizer, {inputs(), labels()}).ok());
  }
  CHECK(nothrow::lock(*training).ok());
  training->unlock();
  CHECK(need(nothrow::publish(*training, *tensors)) == cache->generation());
  CHECK(need(nothrow::publish(*training, cache)) == cache->generation());
  print_scores(*method);

  CHECK(nothrow::save(*cache, argv[3]).error().kind() == ErrorKind::OutputPath);
  CHECK(need(nothrow::save(*cache, argv[4], /*dirty_only=*/true)) != 0);
  const auto again = need(nothrow::open({argv[3]}));
  const auto later = need(nothrow::load_method(*need(nothrow::load_program(argv[2], again)), "forward"));
  CHECK(nothrow::load_all(*again, {argv[4], "/nowhere/delta.ptd"}).error().kind() == ErrorKind::FileAccess);
  CHECK(nothrow::load_all(*again, {argv[4]}).ok() && nothrow::load(*again, argv[4]).ok());
  print_scores(*later);
}
