// The application of with_module.cpp on a cache: the same output, then a weight changed by its name.
//
//   with_cache PROGRAM.pte WEIGHTS.ptd NAME    NAME is a tensor of the model, which is set to zeros

#include <cstdio>

#include <executorch/extension/tensor/tensor.h>

#include <blobstore/cache.h>
#include <blobstore/program.h>
#include <blobstore/tensors.h>

using executorch::extension::make_tensor_ptr;

namespace {

void run(const char* program, const char* weights, const char* name) {
  const auto cache = blobstore::BlobCache::open({weights});
  const auto loaded = blobstore::Program::load(program, cache);

  const auto outputs = loaded->forward(make_tensor_ptr({1, 2}, {0.5f, -0.5f}));
  std::printf("%.6f\n", outputs[0].toTensor().const_data_ptr<float>()[0]);

  const blobstore::LogicalTensors tensors(cache);
  const auto& sizes = tensors.at(name).sizes;
  tensors.update({{name, executorch::extension::zeros({sizes.begin(), sizes.end()})}});
  const auto changed = loaded->forward(make_tensor_ptr({1, 2}, {0.5f, -0.5f}));
  std::printf("%.6f\n", changed[0].toTensor().const_data_ptr<float>()[0]);
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: with_cache PROGRAM.pte WEIGHTS.ptd NAME\n");
    return 64;
  }
  try {
    run(argv[1], argv[2], argv[3]);
  } catch (const blobstore::Error& error) {
    std::fprintf(stderr, "with_cache: %s\n", error.what());
    return 1;
  }
  return 0;
}
