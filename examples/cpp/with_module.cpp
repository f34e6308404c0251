// What an application does today: ExecuTorch's own Module. docs/cpp.md starts here.
//
//   with_module PROGRAM.pte WEIGHTS.ptd    for a program that takes one tensor of shape (1, 2)

#include <cstdio>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr.h>

using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: with_module PROGRAM.pte WEIGHTS.ptd\n");
    return 64;
  }
  Module module(argv[1], argv[2]);
  const auto result = module.forward(make_tensor_ptr({1, 2}, {0.5f, -0.5f}));
  if (!result.ok()) {
    std::fprintf(stderr, "with_module: error %d\n", static_cast<int>(result.error()));
    return 1;
  }
  std::printf("%.6f\n", result->at(0).toTensor().const_data_ptr<float>()[0]);
  return 0;
}
