// What docs/cpp.md says of applications that keep ExecuTorch's own Module, step by step.
//
//   module_on_cache STEP FOLDER [LOAD_MODE]
//
// FOLDER has serve.pte, which takes a float[1, 8], with foundation.ptd and adapter.ptd; other.ptd, another adapter;
// fine_tune.safetensors, a state dict without an adapter; and of_tuned.ptd, an adapter for it. Each line that is
// printed is the output of a call, or what went wrong.

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <blobstore/adapters.h>
#include <blobstore/cache.h>
#include <blobstore/delegate.h>
#include <blobstore/tensors.h>

namespace {

using blobstore::BlobCache;
using blobstore::CacheScope;
using blobstore::LogicalTensors;
using executorch::extension::Module;
using executorch::extension::TensorPtr;

TensorPtr input() {
  return executorch::extension::make_tensor_ptr({1, 8}, {1.0f, -2.0f, 3.0f, -4.0f, 5.0f, -6.0f, 7.0f, -8.0f});
}

void print(const executorch::aten::Tensor& tensor) {
  for (ssize_t i = 0; i < tensor.numel(); ++i) {
    std::printf(i == 0 ? "%.9g" : " %.9g", static_cast<double>(tensor.const_data_ptr<float>()[i]));
  }
  std::printf("\n");
}

void run(Module& module) {
  const auto outputs = module.forward(input());
  if (!outputs.ok()) {
    std::printf("error %d\n", static_cast<int>(outputs.error()));
    return;
  }
  print(outputs->at(0).toTensor());
}

/// Print "done", or the error with its reason.
void load(Module& module) {
  const auto error = module.load_method("forward");
  const auto failure = blobstore::take_delegate_failure();
  std::printf(
      error == executorch::runtime::Error::Ok ? "done\n" : "error %d: %s\n",
      static_cast<int>(error),
      failure ? failure->reason.c_str() : "");
}

/// Print "done", or why the library refused.
template <typename Function>
void attempt(const Function& function) {
  try {
    function();
    std::printf("done\n");
  } catch (const blobstore::Error& error) {
    std::printf("refused: %s\n", error.what());
  }
}

std::vector<std::string> both(const std::string& folder) {
  return {folder + "/foundation.ptd", folder + "/adapter.ptd"};
}

/// Without a scope, the delegates take the files that the Module has, and follow nothing.
void without_a_scope(const std::string& folder) {
  blobstore::register_delegate();
  const auto cache = BlobCache::open(both(folder));
  Module module(folder + "/serve.pte", both(folder));
  load(module);
  run(module);
  const LogicalTensors tensors(cache);
  attempt([&] { blobstore::load_adapter(tensors, folder + "/other.ptd"); });
  run(module);
}

/// A scope counts for loading a method, in its own thread, and not for loading the program.
void scope_in_vain(const std::string& folder, bool of_another_thread) {
  blobstore::register_delegate();
  const auto cache = BlobCache::open(both(folder));
  Module module(folder + "/serve.pte", both(folder));
  {
    const CacheScope scope(cache);
    if (of_another_thread) {
      std::thread([&] { load(module); }).join();
    } else if (module.load() != executorch::runtime::Error::Ok) {
      std::printf("not loaded\n");
    }
  }
  run(module);
  blobstore::load_adapter(LogicalTensors(cache), folder + "/other.ptd");
  run(module);
}

/// Delegates follow a cache of any mode, with a base, after the scope and all that was named here are gone.
void adapters(const std::string& folder) {
  blobstore::register_delegate();
  Module module(folder + "/serve.pte", both(folder)); // LoadMode::File
  std::weak_ptr<BlobCache> held;
  {
    const auto base = BlobCache::open({folder + "/foundation.ptd"});
    const auto cache = BlobCache::open({folder + "/adapter.ptd"}, BlobCache::Mode::Private, base);
    held = cache;
    const CacheScope scope(cache);
    load(module);
  }
  const auto cache = held.lock(); // the delegates hold it
  run(module);
  const LogicalTensors tensors(cache);
  blobstore::load_adapter(tensors, folder + "/other.ptd");
  run(module);
  blobstore::set_adapter_strength(tensors, 0);
  run(module);
  cache->revert();
  run(module);
  const auto state = blobstore::load_state_dict(folder + "/fine_tune.safetensors");
  attempt([&] { LogicalTensors(cache->base()).update({{"norm.weight", state.at("norm.weight")}}); });
  run(module);
  std::printf("%zu served\n", blobstore::served_delegates(*cache).size());
  if (!module.unload_method("forward")) {
    std::printf("not unloaded\n");
  }
  std::printf("%zu served\n", blobstore::served_delegates(*cache).size());
}

/// On a shared working copy that the Module maps, everything follows; on one that it read, updates are refused.
void load_mode(const std::string& folder, Module::LoadMode mode) {
  blobstore::register_delegate();
  const std::string live = folder + "/live.ptd";
  blobstore::make_working_copy(both(folder), live);
  const auto cache = BlobCache::open({live}, BlobCache::Mode::Shared);
  Module module(folder + "/serve.pte", live, mode);
  {
    const CacheScope scope(cache);
    load(module);
  }
  run(module);
  const LogicalTensors tensors(cache);
  blobstore::AdapterOptions options;
  options.fine_tune = blobstore::load_state_dict(folder + "/fine_tune.safetensors");
  attempt([&] { blobstore::load_adapter(tensors, folder + "/of_tuned.ptd", options); });
  run(module);
  attempt([&] { cache->load_all(both(folder)); });
  run(module);
}

/// Delegates of another partitioner take their weights from the working copy when they are loaded, and never again.
void another_partitioner(const std::string& folder) {
  const std::string live = folder + "/live.ptd";
  blobstore::make_working_copy({folder + "/stock.ptd"}, live);
  const auto cache = BlobCache::open({live}, BlobCache::Mode::Shared);
  Module module(folder + "/stock.pte", live, Module::LoadMode::Mmap);
  {
    const CacheScope scope(cache);
    load(module);
  }
  run(module);
  std::printf("%zu served\n", blobstore::served_delegates(*cache).size());
  std::vector<blobstore::Change> changes;
  for (size_t i = 0; i < cache->size(); ++i) {
    const blobstore::Blob& blob = cache->blob(i);
    if (blob.layout && blob.layout->scalar_type == static_cast<int8_t>(executorch::aten::ScalarType::Float)) {
      changes.emplace_back(blob.key, std::vector<float>(blob.size / sizeof(float), 2));
    }
  }
  attempt([&] { cache->update(changes); });
  run(module);
}

} // namespace

int main(int argc, char** argv) try {
  if (argc < 3) {
    return 64;
  }
  const std::string step = argv[1];
  const std::string folder = argv[2];
  const std::map<std::string, Module::LoadMode> modes = {
      {"File", Module::LoadMode::File},
      {"Mmap", Module::LoadMode::Mmap},
      {"MmapUseMlock", Module::LoadMode::MmapUseMlock},
      {"MmapUseMlockIgnoreErrors", Module::LoadMode::MmapUseMlockIgnoreErrors},
      {"MmapUseMadvise", Module::LoadMode::MmapUseMadvise},
  };
  if (step == "without_a_scope") {
    without_a_scope(folder);
  } else if (step == "scope_of_the_program" || step == "scope_of_another_thread") {
    scope_in_vain(folder, step == "scope_of_another_thread");
  } else if (step == "adapters") {
    adapters(folder);
  } else if (step == "load_mode" && argc == 4) {
    load_mode(folder, modes.at(argv[3]));
  } else if (step == "another_partitioner") {
    another_partitioner(folder);
  } else {
    return 64;
  }
  return 0;
} catch (const blobstore::Error& error) {
  std::fprintf(stderr, "module_on_cache: %s\n", error.what());
  return 1;
}
