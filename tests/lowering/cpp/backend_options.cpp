// Runs "forward" with options for a backend, on an input of ones, and prints its first output.
//
//   backend_options PROGRAM.pte WEIGHTS.ptd PATH load|process
//
// PATH is a file for packed weights. The program passes it with the load, or to XNNPACK for the whole process.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <executorch/extension/data_loader/file_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/cache.h>
#include <blobstore/data_map.h>
#include <blobstore/delegate.h>

namespace et = executorch::runtime;
using executorch::extension::FileDataLoader;
using executorch::extension::MallocMemoryAllocator;

void check(et::Error error, const char* what) {
  if (error != et::Error::Ok) {
    std::fprintf(stderr, "%s: %s\n", what, et::to_string(error));
    std::exit(1);
  }
}

int main(int argc, char** argv) {
  if (argc != 5) {
    return 64;
  }
  et::runtime_init();
  blobstore::register_delegate();
  et::LoadBackendOptionsMap of_load;
  et::BackendOption options[2] = {{"packed_cache_path", {}}, {"weight_cache_enabled", true}};
  std::array<char, et::kMaxOptionValueLength> path{};
  std::strncpy(path.data(), argv[3], path.size() - 1);
  options[0].value = path;
  if (std::strcmp(argv[4], "load") == 0) {
    for (const char* backend : {"BlobStoreBackend", "XnnpackBackend"}) {
      check(of_load.set_options(backend, {options, 2}), "options of the load");
    }
  } else {
    check(et::set_option("XnnpackBackend", {options, 2}), "options of the process");
  }

  const auto cache = blobstore::BlobCache::open({argv[2]});
  const blobstore::CacheDataMap map(cache);
  auto loader = FileDataLoader::from(argv[1]);
  check(loader.error(), "the file");
  auto program = et::Program::load(&loader.get());
  check(program.error(), "the program");
  MallocMemoryAllocator memory, temporary;
  std::vector<std::vector<uint8_t>> planned;
  std::vector<et::Span<uint8_t>> spans;
  const auto about = program->method_meta("forward");
  for (size_t i = 0; i < about->num_memory_planned_buffers(); ++i) {
    planned.emplace_back(about->memory_planned_buffer_size(i).get());
    spans.emplace_back(planned.back().data(), planned.back().size());
  }
  et::HierarchicalAllocator hierarchy({spans.data(), spans.size()});
  et::MemoryManager manager(&memory, &hierarchy, &temporary);
  const blobstore::CacheScope scope(cache);
  auto method = program->load_method("forward", &manager, nullptr, &map, &of_load);
  check(method.error(), "the method");
  et::EValue input;
  check(method->get_inputs(&input, 1), "the input");
  for (int i = 0; i < input.toTensor().numel(); ++i) {
    input.toTensor().mutable_data_ptr<float>()[i] = 1;
  }
  check(method->execute(), "the call");
  const auto& output = method->get_output(0).toTensor();
  for (int i = 0; i < output.numel(); ++i) {
    std::printf("%.9g\n", output.const_data_ptr<float>()[i]);
  }
  check(
      et::set_option(
          "XnnpackBackend",
          [&] {
            options[0] = {"save_weight_cache_on_disk", true};
            return et::Span<et::BackendOption>(options, 1);
          }()),
      "saving");
  return 0;
}
