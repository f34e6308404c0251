// Trains a program, and continues from checkpoints; a test in Python compares the files with those of torch.
//
//   checkpoint_test TRAIN.pte WEIGHTS.ptd
//   checkpoint_test TRAIN.pte WEIGHTS.ptd OPTIMIZER STEPS FROM TO [BASE]
//
// TRAIN.pte is that of examples/xor.py. The first form tries what goes wrong. The second one makes an optimizer (sgd,
// momentum, nesterov, adamw, amsgrad), continues from a checkpoint unless FROM is -, and saves another.

#include <cmath>

#include "xor.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

std::unique_ptr<Optimizer> make(const std::string& name) {
  if (name == "adamw" || name == "amsgrad") {
    AdamWOptions options;
    options.lr = 0.03;
    options.weight_decay = 0.1;
    options.amsgrad = name == "amsgrad";
    options.maximize = false;
    return std::make_unique<AdamW>(options);
  }
  SGDOptions options;
  options.lr = 0.3;
  options.momentum = name == "sgd" ? 0 : 0.9;
  options.weight_decay = name == "sgd" ? 0 : 0.01;
  options.nesterov = name == "nesterov";
  return std::make_unique<SGD>(options);
}

void run(TrainingProgram& training, Optimizer& optimizer, int steps) {
  const Batch batch;
  for (; steps > 0; --steps) {
    (void)training.step(optimizer, {batch.inputs, batch.labels});
  }
}

/// An optimizer of an application, which gives no access to its state.
class Own final : public Optimizer {
 public:
  void step(const StateDict&, const StateDict&) override {}
};

/// A damaged file, one of another optimizer, or of another place is one error, and changes nothing.
void what_goes_wrong(TrainingProgram& training, const std::string& weights) {
  const auto optimizer = make("adamw");
  run(training, *optimizer, 3);
  CHECK(training.save("good.checkpoint", optimizer.get(), {}, {{"step", "3"}}) == read("good.checkpoint").size());
  const auto before = numbers(training);
  run(training, *optimizer, 2);
  const auto after = numbers(training);
  CHECK(before != after);

  const std::string good = read("good.checkpoint");
  const auto is_refused = [&](const std::string& bytes) {
    write("bad.checkpoint", bytes);
    try {
      training.load("bad.checkpoint", optimizer.get());
      return false;
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::InvalidFile || error.kind() == ErrorKind::Integrity);
      return has(error.what(), "bad.checkpoint");
    }
  };
  for (size_t size = 0; size < good.size(); size += 37) {
    CHECK(is_refused(good.substr(0, size)) && numbers(training) == after);
  }
  for (size_t at = 0; at < good.size(); at += 11) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x20);
    if (!is_refused(bad)) { // a bit of padding between tensors
      CHECK(numbers(training) == before);
      training.load("good.checkpoint", optimizer.get());
      run(training, *optimizer, 2);
    }
    CHECK(numbers(training) == after);
  }

  const auto other = make("momentum");
  refused(ErrorKind::Checkpoint, "good.checkpoint: the saved state is that of optimizer AdamW, not of SGD", [&] {
    training.load("good.checkpoint", other.get());
  });
  Own own;
  (void)error_of(ErrorKind::Unsupported, [&] { training.load("good.checkpoint", &own); });
  (void)error_of(ErrorKind::Unsupported, [&] { (void)training.save("own.checkpoint", &own); });
  CHECK(access("own.checkpoint", F_OK) != 0);
  refused(ErrorKind::InvalidFile, "not a checkpoint", [&] { training.load(weights, optimizer.get()); });
  (void)error_of(ErrorKind::FileAccess, [&] { training.load("missing", optimizer.get()); });
  (void)error_of(ErrorKind::OutputPath, [&] { (void)training.save(weights, optimizer.get()); });
  (void)error_of(ErrorKind::OutputPath, [&] { (void)training.save(training.program()->path()); });
  CHECK(training.save("bare.checkpoint") > 0);
  refused(ErrorKind::Checkpoint, "has no state of an optimizer", [&] {
    training.load("bare.checkpoint", optimizer.get());
  });
  CHECK(numbers(training) == after);

  CHECK(training.save("delta.checkpoint", optimizer.get(), {"good.checkpoint"}) < good.size() + 1000);
  refused(ErrorKind::OutputPath, "good.checkpoint", [&] {
    (void)training.save("good.checkpoint", nullptr, {"good.checkpoint"});
  });
  CHECK(training.save("same.checkpoint", nullptr, {"bare.checkpoint"}) < read("bare.checkpoint").size() + 1000);
  refused(ErrorKind::Checkpoint, "is not in the checkpoint but in its base, bare.checkpoint; none is given", [&] {
    training.load("same.checkpoint");
  });
  refused(ErrorKind::Checkpoint, "its base, bare.checkpoint, is not good.checkpoint", [&] {
    training.load("same.checkpoint", nullptr, {"good.checkpoint"});
  });
  training.load("same.checkpoint", nullptr, {"bare.checkpoint"});
  CHECK(numbers(training) == after);
  training.load("good.checkpoint", optimizer.get());
  CHECK(numbers(training) == before);
}

/// Options that torch refuses, too.
void impossible_options() {
  for (int i = 0; i < 7; ++i) {
    AdamWOptions options;
    double* const wrong[] = {
        &options.lr, &options.eps, &options.weight_decay, &options.beta1, &options.beta2, &options.beta1, &options.lr};
    *wrong[i] = i == 5 ? 1 : i == 6 ? INFINITY : -0.1;
    (void)error_of(ErrorKind::Training, [&] { const AdamW optimizer(options); });
    AdamW optimizer;
    (void)error_of(ErrorKind::Training, [&] { optimizer.set_options(options); });
    CHECK(optimizer.options().lr < 1e-2 && optimizer.options().lr > 0);
  }
}

/// Continue from a checkpoint unless it is "-", and save another. Prints the error, if any.
void train(
    TrainingProgram& training,
    Optimizer& optimizer,
    int steps,
    const std::string& from,
    const std::string& to,
    const std::vector<std::string>& base) {
  try {
    if (from != "-") {
      training.load(from, &optimizer, base);
    }
    run(training, optimizer, steps);
    (void)training.save(to, &optimizer, base);
  } catch (const Error& error) {
    std::printf("%d %s\n", static_cast<int>(error.kind()), error.what());
  }
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 3 || argc == 7 || argc == 8);
  const auto program = Program::load(argv[1], BlobCache::open({argv[2]}));
  TrainingProgram training(program);
  if (argc == 3) {
    impossible_options();
    what_goes_wrong(training, argv[2]);
  } else {
    train(training, *make(argv[3]), std::stoi(argv[4]), argv[5], argv[6], {argv + 7, argv + argc});
  }
}
