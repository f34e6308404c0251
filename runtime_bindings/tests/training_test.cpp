// Trains a program and publishes it; prints figures that a test in Python compares with torch.
//
//   training_test TRAIN.pte WEIGHTS.ptd LR MOMENTUM DAMPENING WEIGHT_DECAY NESTEROV STEPS
//
// TRAIN.pte is that of examples/xor.py. Prints "loss NUMBER" for each step and then "NAME NUMBER ..." for each
// parameter.

#include <future>
#include <limits>
#include <mutex>

#include "xor.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there
using executorch::extension::make_tensor_ptr;
using executorch::extension::TensorPtr;

/// An infinite or NaN loss changes nothing, unless it is accepted.
void losses_that_are_not_finite(TrainingProgram& training) {
  const Batch batch;
  SGD optimizer({0.1, 0.9});
  const TensorPtr bad = make_tensor_ptr({4, 2}, std::vector<float>(8, std::numeric_limits<float>::quiet_NaN()));
  const auto before = numbers(training);
  CHECK(fails(ErrorKind::NotFiniteLoss, [&] { (void)training.step(optimizer, {bad, batch.labels}); }));
  (void)training.step(optimizer, {bad, batch.labels}, OnNan::Skip);
  CHECK(numbers(training) == before);
  CHECK(fails(ErrorKind::Input, [&] { (void)training.step(optimizer, {bad}); }));
  CHECK(fails(ErrorKind::Training, [&] { optimizer.step(training.named_parameters(), {}); }));
  CHECK(numbers(training) == before);
}

/// Options that torch refuses too.
void impossible_options() {
  for (const SGDOptions& options :
       {SGDOptions{-1},
        SGDOptions{0.1, -1},
        SGDOptions{0.1, 0, 0, -1},
        SGDOptions{0.1, 0, 0, 0, true},
        SGDOptions{0.1, 0.9, 0.1, 0, true}}) {
    CHECK(fails(ErrorKind::Training, [&] { SGD optimizer(options); }));
  }
}

/// A child has its own copy; if another thread was using it at the fork, the child gets an error.
void forks(TrainingProgram& training) {
  const Batch batch;
  SGD optimizer({0.1});
  const auto before = numbers(training);
  training.lock();
  CHECK(in_child([&] { // the thread that has the turn goes on
    (void)training.step(optimizer, {batch.inputs, batch.labels});
    training.unlock();
    (void)training.forward_backward({batch.inputs, batch.labels});
  }));
  training.unlock();
  CHECK(numbers(training) == before);

  std::promise<void> begun;
  std::promise<void> done;
  std::thread other([&] {
    const std::lock_guard<TrainingProgram> turn(training);
    begun.set_value();
    done.get_future().wait();
  });
  begun.get_future().wait();
  CHECK(in_child([&] {
    CHECK(fails(ErrorKind::Training, [&] { training.lock(); }));
    CHECK(fails(ErrorKind::Training, [&] { (void)training.forward_backward({batch.inputs, batch.labels}); }));
  }));
  done.set_value();
  other.join();
  const std::lock_guard<TrainingProgram> turn(training);
}

/// Publishing is one commit of all parameters, or an error and none.
void publishing(TrainingProgram& training, const std::string& weights) {
  const auto cache = BlobCache::open({weights});
  const auto empty = BlobCache::open({});
  CHECK(fails(ErrorKind::KeyNotFound, [&] { (void)training.publish(empty); }));
  CHECK(fails(ErrorKind::Update, [&] { (void)training.publish(empty, /*strict=*/false); }));
  CHECK(training.publish(cache) == 1 && cache->generation() == 1);
  const LogicalTensors tensors(cache);
  training.named_parameters().at("out.bias")->mutable_data_ptr<float>()[0] = std::numeric_limits<float>::infinity();
  CHECK(fails(ErrorKind::Update, [&] { (void)training.publish(tensors, true, /*finite=*/true); }));
  CHECK(cache->generation() == 1);
  CHECK(training.publish(tensors) == 2);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 9);
  impossible_options();
  const auto program = Program::load(argv[1], BlobCache::open({argv[2]}));
  TrainingProgram training(program);
  const auto number = [&](int index) { return std::stod(argv[index]); };
  SGD optimizer({number(3), number(4), number(5), number(6), number(7) != 0});
  const Batch batch;
  for (int i = std::stoi(argv[8]); i > 0; --i) {
    const Outputs outputs = training.step(optimizer, {batch.inputs, batch.labels});
    std::printf("loss %.9g\n", static_cast<double>(outputs[0].toTensor().const_data_ptr<float>()[0]));
  }
  for (const auto& [name, tensor] : training.named_parameters()) {
    std::printf("%s", name.c_str());
    const auto* data = tensor->const_data_ptr<float>();
    for (const auto* one = data; one != data + tensor->numel(); ++one) {
      std::printf(" %.9g", static_cast<double>(*one));
    }
    std::printf("\n");
  }
  std::fflush(stdout);
  losses_that_are_not_finite(training);
  forks(training);
  publishing(training, argv[2]);
}
