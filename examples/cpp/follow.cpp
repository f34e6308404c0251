// An application that has ExecuTorch only, and whose weights another process changes: docs/howto/packed.md,
// "Applications that have only ExecuTorch".
//
//   follow PROGRAM.pte WORKING_COPY.ptd PACKED_CACHE_PATH
//
// Loads the program once. For each line on standard input it runs "forward" on ones, and prints the first output.

#include <array>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>

namespace et = executorch::runtime;
using executorch::extension::Module;
using executorch::extension::TensorPtr;

int main(int argc, char** argv) {
  if (argc != 4 || std::strlen(argv[3]) >= et::kMaxOptionValueLength) {
    std::fprintf(stderr, "usage: follow PROGRAM.pte WORKING_COPY.ptd PACKED_CACHE_PATH\n");
    return 64;
  }
  // what XNNPACK reads while it runs is mapped, too
  Module module(argv[1], argv[2], Module::LoadMode::Mmap);
  std::array<char, et::kMaxOptionValueLength> path{};
  std::strcpy(path.data(), argv[3]);
  et::BackendOption options[] = {{"weight_cache_enabled", true}, {"packed_cache_path", path}};
  et::LoadBackendOptionsMap of_backends;
  if (of_backends.set_options("XnnpackBackend", {options, 2}) != et::Error::Ok ||
      module.load(of_backends) != et::Error::Ok || module.load_method("forward") != et::Error::Ok) {
    std::fprintf(stderr, "follow: %s cannot be loaded\n", argv[1]);
    return 1;
  }
  const auto about = module.method_meta("forward");
  std::vector<TensorPtr> ones;
  for (size_t i = 0; i < about->num_inputs(); ++i) {
    const auto sizes = about->input_tensor_meta(i)->sizes();
    ones.push_back(executorch::extension::ones({sizes.begin(), sizes.end()}));
  }
  for (std::string line; std::getline(std::cin, line);) {
    const auto outputs = module.forward(std::vector<et::EValue>(ones.begin(), ones.end()));
    if (!outputs.ok()) {
      std::fprintf(stderr, "follow: error %d\n", static_cast<int>(outputs.error()));
      return 1;
    }
    const auto& output = outputs->at(0).toTensor();
    for (ssize_t i = 0; i < output.numel(); ++i) {
      std::printf("%.9g ", output.const_data_ptr<float>()[i]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}
