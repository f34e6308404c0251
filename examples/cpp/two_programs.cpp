// Two programs on one cache of weights: run both, change a weight once, run both again.
//
//   two_programs FIRST.pte SECOND.pte WEIGHTS.ptd KEY
//
// All inputs are tensors of ones; the sum of each program's first output is printed before and after KEY is set to 0.

#include <cstdio>
#include <numeric>
#include <vector>

#include <executorch/extension/tensor/tensor.h>

#include <blobstore/cache.h>
#include <blobstore/program.h>

namespace {

/// The sum of the first output for inputs of ones. All tensors must be float.
double run(blobstore::Method& method) {
  const auto meta = method.meta();
  std::vector<executorch::extension::TensorPtr> ones; // they own the inputs' memory
  for (size_t i = 0; i < meta.num_inputs(); ++i) {
    const auto sizes = meta.input_tensor_meta(i)->sizes();
    ones.push_back(executorch::extension::ones({sizes.begin(), sizes.end()}));
  }
  const std::vector<executorch::runtime::EValue> inputs(ones.begin(), ones.end());
  const blobstore::Outputs outputs = method.execute(inputs);
  const auto& first = outputs[0].toTensor();
  const auto* numbers = first.const_data_ptr<float>();
  return std::accumulate(numbers, numbers + first.numel(), 0.0);
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: two_programs FIRST.pte SECOND.pte WEIGHTS.ptd KEY\n");
    return 64;
  }
  try {
    const auto cache = blobstore::BlobCache::open({argv[3]});
    const auto first = blobstore::Program::load(argv[1], cache)->load_method("forward");
    const auto second = blobstore::Program::load(argv[2], cache)->load_method("forward");
    std::printf(
        "generation %llu: %.6f %.6f\n",
        static_cast<unsigned long long>(cache->generation()),
        run(*first),
        run(*second));

    cache->update({{argv[4], std::vector<uint8_t>(cache->at(argv[4]).size)}});
    std::printf(
        "generation %llu: %.6f %.6f\n",
        static_cast<unsigned long long>(cache->generation()),
        run(*first),
        run(*second));
  } catch (const blobstore::Error& error) {
    std::fprintf(stderr, "two_programs: %s\n", error.what());
    return 1;
  }
  return 0;
}
