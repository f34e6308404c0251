// Two programs on one cache of weights: run both, change a weight once, run both again.
//
//   two_programs FIRST.pte SECOND.pte WEIGHTS.ptd KEY
//
// All inputs are tensors of ones; the sum of each program's first output is printed before and after KEY is set to 0.

#include <cstdio>
#include <string>
#include <vector>

#include <blobstore/cache.h>
#include <blobstore/program.h>

namespace {

/// The sum of the first output for inputs of ones. All tensors must be float.
double run(blobstore::Method& method) {
  std::vector<std::vector<float>> memory;
  std::vector<blobstore::Argument> arguments;
  for (const blobstore::ValueInfo& input : method.inputs()) {
    blobstore::Argument argument;
    argument.kind = input.kind;
    argument.scalar_type = input.layout.scalar_type;
    argument.rank = static_cast<uint8_t>(input.layout.sizes.size());
    for (size_t i = 0; i < input.layout.sizes.size(); ++i) {
      argument.sizes[i] = input.layout.sizes[i];
    }
    argument.nbytes = *blobstore::layout_nbytes(input.layout);
    memory.emplace_back(argument.nbytes / sizeof(float), 1.0f);
    argument.data = memory.back().data();
    arguments.push_back(argument);
  }
  const std::vector<blobstore::Value> outputs = method.execute(arguments);
  const auto* numbers = reinterpret_cast<const float*>(outputs[0].data.get());
  double sum = 0;
  for (size_t i = 0; i < outputs[0].nbytes / sizeof(float); ++i) {
    sum += numbers[i];
  }
  return sum;
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

    const blobstore::Blob& weight = cache->at(argv[4]);
    const std::vector<uint8_t> zeros(weight.size);
    cache->update({{argv[4], zeros.data(), zeros.size(), nullptr}});
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
