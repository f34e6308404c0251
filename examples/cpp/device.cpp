// The whole life of weights on a device, without Python: open a foundation and an adapter, run, change a tensor by its
// name, exchange the adapter, train, publish, save what changed, and start again from it.
//
//   device FOLDER    with the files that prepare.py wrote; writes trained.ptd there

#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include <executorch/extension/tensor/tensor_ptr.h>

#include <blobstore/adapters.h>
#include <blobstore/cache.h>
#include <blobstore/program.h>
#include <blobstore/tensors.h>
#include <blobstore/training.h>

using blobstore::BlobCache;
using blobstore::LogicalTensors;
using blobstore::Method;
using blobstore::Program;
using executorch::extension::make_tensor_ptr;

namespace {

constexpr int kBatch = 16; // that train.pte was exported for

struct Task {
  const char* name;
  bool (*is_first)(float x, float y); // of the two classes
};
constexpr Task kLeft{"left", [](float x, float) { return x < 0; }};
constexpr Task kUp{"up", [](float, float y) { return y > 0; }};
constexpr Task kCorner{"corner", [](float x, float y) { return x < 0 && y > 0; }};

/// A point in the square from -1 to 1.
std::vector<float> random_point(std::mt19937& random) {
  std::uniform_real_distribution<float> number(-1, 1);
  return {number(random), number(random)};
}

/// Print how many of 1,000 random points a program classifies as the task does.
int score(const char* when, Method& serve, const Task& task) {
  std::mt19937 random(1);
  int right = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::vector<float> point = random_point(random);
    const auto outputs = serve.execute({make_tensor_ptr({1, 2}, point)});
    const float* scores = outputs[0].toTensor().const_data_ptr<float>();
    right += (scores[1] > scores[0]) == task.is_first(point[0], point[1]);
  }
  std::printf("%-38s %s %4d of 1000\n", when, task.name, right);
  return right;
}

/// Take steps on random points.
void train(blobstore::TrainingProgram& training, const Task& task, int steps) {
  blobstore::SGD optimizer({/*lr=*/0.02, /*momentum=*/0.9});
  std::mt19937 random(2);
  for (int step = 0; step < steps; ++step) {
    std::vector<float> points;
    std::vector<int64_t> labels;
    for (int i = 0; i < kBatch; ++i) {
      const std::vector<float> point = random_point(random);
      points.insert(points.end(), point.begin(), point.end());
      labels.push_back(task.is_first(point[0], point[1]));
    }
    training.step(optimizer, {make_tensor_ptr({kBatch, 2}, points), make_tensor_ptr({kBatch}, labels)});
  }
}

void live(const std::string& folder) {
  // Weights: the foundation's pages are shared by all processes, the adapter lies on top.
  const auto foundation = BlobCache::open({folder + "/foundation.ptd"});
  const auto cache = BlobCache::open({folder + "/adapter.ptd"}, BlobCache::Mode::Private, foundation);
  const auto serve = Program::load(folder + "/serve.pte", cache)->load_method("forward");
  const LogicalTensors tensors(cache); // the tensors of the model by name

  blobstore::load_adapter(tensors, folder + "/left.ptd");
  score("adapter left.ptd", *serve, kLeft);

  tensors.update({{"head.bias", make_tensor_ptr({2}, {100.0f, 0.0f})}});
  score("head.bias changed", *serve, kLeft);

  blobstore::load_adapter(tensors, folder + "/up.ptd"); // the whole adapter, so head.bias too
  score("adapter up.ptd", *serve, kUp);
  score("", *serve, kCorner);

  blobstore::TrainingProgram training(Program::load(folder + "/train.pte", cache)); // goes on from up.ptd
  train(training, kCorner, 200);
  score("trained, not published", *serve, kCorner);
  training.publish(tensors);
  const int published = score("published", *serve, kCorner);

  cache->save(folder + "/trained.ptd", /*dirty_only=*/true);
  cache->revert();
  score("reverted", *serve, kCorner);

  // The next start of the application.
  const auto again = BlobCache::open({folder + "/adapter.ptd"}, BlobCache::Mode::Private, foundation);
  again->load(folder + "/trained.ptd");
  const auto restarted = Program::load(folder + "/serve.pte", again)->load_method("forward");
  if (score("started again from trained.ptd", *restarted, kCorner) != published) {
    throw blobstore::Error(blobstore::ErrorKind::Execution, "the restarted program computes something else");
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: device FOLDER\n");
    return 64;
  }
  try {
    live(argv[1]);
  } catch (const blobstore::Error& error) {
    std::fprintf(stderr, "device: %s\n", error.what());
    return 1;
  }
  return 0;
}
