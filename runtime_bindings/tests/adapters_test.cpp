// Exercises adapters in C++: what only the C++ interface has, and loading, scaling and merging from several threads;
// sanitizers judge. The tests in Python compare what is computed.
//
//   adapters_test FOLDER
//
// FOLDER has foundation.ptd with a float tensor "m.weight" of shape (7, 5); adapter.ptd with "m.lora_a" (2, 5) and
// "m.lora_b" (7, 2), all zero; and adapters 1.ptd and 2.ptd for this foundation whose tensors are 1 or 2 everywhere.
// peft is a folder of PEFT with rank 1 and scale 0.5, whose lora_A is 3 and lora_B 4 everywhere.
// tuned.ptd is a fine-tune whose weight is 9 everywhere, and of_tuned.ptd an adapter for it whose tensors are 2.

#include <cmath>

#include <blobstore/adapters.h>
#include <blobstore/nothrow.h>
#include <blobstore/tensors.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

/// Every reader sees one adapter, at one strength.
void test_exchange_in_threads(const std::string& folder) {
  const auto base = BlobCache::open({folder + "/foundation.ptd"});
  const auto cache = BlobCache::open({folder + "/adapter.ptd"}, BlobCache::Mode::Private, base);
  const LogicalTensors tensors(cache);
  load_adapter(tensors, folder + "/1.ptd");
  const Repeating reads([&](int) {
    const BlobCache::Reading reading(*cache);
    const float a = first(*cache, "m.lora_a");
    const float b = first(*cache, "m.lora_b");
    CHECK((a == 1 || a == 2) && (b == a || b == a / 2));
  });
  const Repeating strengths([&](int n) { set_adapter_strength(tensors, n % 2 == 0 ? 0.5 : 1); });
  for (int i = 0; i < 50; ++i) {
    load_adapter(tensors, folder + (i % 2 == 0 ? "/1.ptd" : "/2.ptd"));
  }
}

/// No merge is lost, and undoing in reverse order restores every byte.
void test_merges_in_threads(const std::string& folder) {
  const auto cache = BlobCache::open({folder + "/foundation.ptd"});
  const LogicalTensors tensors(cache);
  const std::vector<float> before = floats(*cache, "m.weight");
  std::vector<std::unique_ptr<MergedAdapter>> merged(4);
  std::vector<std::thread> threads;
  for (auto& one : merged) {
    threads.emplace_back([&] { one = merge_adapter(tensors, folder + "/1.ptd"); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(first(*cache, "m.weight") == before[0] + 4 * 2);
  for (uint64_t last = cache->generation(); last > 0; --last) {
    for (auto& one : merged) {
      if (one->generation() == last) {
        one->undo();
        CHECK(one->undone() && fails(ErrorKind::Adapter, [&] { one->undo(); }));
      }
    }
  }
  CHECK(floats(*cache, "m.weight") == before);
}

/// The numbers of the foundation and of the adapter.
std::vector<std::vector<float>> contents(const BlobCache& cache) {
  return {floats(cache, "m.weight"), floats(cache, "m.lora_a"), floats(cache, "m.lora_b")};
}

/// A fine-tune and its adapter come together; each alone, or with another one, is refused.
void test_fine_tune(const std::string& folder) {
  const std::string of_tuned = folder + "/of_tuned.ptd";
  const auto cache = BlobCache::open({folder + "/foundation.ptd", folder + "/adapter.ptd"});
  const LogicalTensors tensors(cache);
  const auto before = contents(*cache);
  CHECK(fails(ErrorKind::Adapter, [&] { load_adapter(tensors, of_tuned); }));
  const StateDict tuned = load_state_dict(folder + "/tuned.ptd");
  AdapterOptions options;
  options.fine_tune = tuned;
  CHECK(fails(ErrorKind::Adapter, [&] { load_adapter(tensors, folder + "/1.ptd", options); }));
  options.fine_tune = {{"m.weight", nullptr}};
  CHECK(fails(ErrorKind::UnsupportedData, [&] { load_adapter(tensors, of_tuned, options); }));
  options.fine_tune = {{"other.weight", tuned.at("m.weight")}};
  CHECK(fails(ErrorKind::Adapter, [&] { load_adapter(tensors, of_tuned, options); })); // nothing changed
  options.fine_tune = {{"m.weight", executorch::extension::zeros({7, 4})}};
  CHECK(fails(ErrorKind::Layout, [&] { load_adapter(tensors, of_tuned, options); }));
  CHECK(cache->generation() == 0 && contents(*cache) == before);

  options.fine_tune = tuned;
  options.fine_tune.emplace("m.lora_a", executorch::extension::zeros({2, 5})); // as PEFT's state dict has one
  options.strength = 0.5;
  CHECK(load_adapter(tensors, of_tuned, options) == 1);
  CHECK(first(*cache, "m.weight") == 9 && first(*cache, "m.lora_a") == 2 && first(*cache, "m.lora_b") == 1);
  CHECK(set_adapter_strength(tensors, 1) == 2 && first(*cache, "m.lora_b") == 2);
  CHECK(load_adapter(tensors, of_tuned) == 3); // the foundation that is there now
  cache->revert();
  CHECK(contents(*cache) == before && fails(ErrorKind::Adapter, [&] { load_adapter(tensors, of_tuned); }));

  CHECK(cache->load_all({folder + "/tuned.ptd", of_tuned}) == 5);
  CHECK(first(*cache, "m.weight") == 9 && first(*cache, "m.lora_b") == 2);

  const auto base = BlobCache::open({folder + "/foundation.ptd"});
  const LogicalTensors above(BlobCache::open({folder + "/adapter.ptd"}, BlobCache::Mode::Private, base));
  options.fine_tune = tuned;
  CHECK(fails(ErrorKind::KeyNotFound, [&] { load_adapter(above, of_tuned, options); }));
  base->load(folder + "/tuned.ptd");
  CHECK(load_adapter(above, of_tuned) == 2); // a generation of the base counts, too
}

/// A folder of PEFT is taken as it is: its rank is filled up with zeros, and its scale made up for.
void test_peft_folder(const std::string& folder) {
  const std::string peft = folder + "/peft";
  const auto foundation = BlobCache::open({folder + "/foundation.ptd"});
  const auto cache = BlobCache::open({folder + "/adapter.ptd"}, BlobCache::Mode::Private, foundation);
  const LogicalTensors tensors(cache);
  CHECK(fails(ErrorKind::Adapter, [&] { load_adapter(tensors, peft); })); // nobody says the program's scale
  AdapterOptions options;
  options.program_scale = 0.25;
  load_adapter(tensors, peft, options);
  CHECK((floats(*cache, "m.lora_a") == std::vector<float>{3, 3, 3, 3, 3, 0, 0, 0, 0, 0}));
  const std::vector<float> b{8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0, 8, 0};
  CHECK(floats(*cache, "m.lora_b") == b);
  set_adapter_strength(tensors, 0.5);
  CHECK(floats(*cache, "m.lora_b")[12] == 4);
  load_adapters(tensors, {{peft, 1}, {peft, -1}}, 0.5);
  CHECK(
      floats(*cache, "m.lora_a")[9] == 3 && floats(*cache, "m.lora_b")[12] == 4 &&
      floats(*cache, "m.lora_b")[13] == -4);
  CHECK(set_adapter_strengths(tensors, {1, 0}) == cache->generation());
  CHECK(floats(*cache, "m.lora_b")[13] == 0 && !nothrow::set_adapter_strengths(tensors, {}).ok());
  CHECK(fails(ErrorKind::Adapter, [&] { load_adapters(tensors, {{peft, 1}, {peft, 1}, {peft, 1}}, 1.0); }));

  const auto both = BlobCache::open({folder + "/foundation.ptd", folder + "/adapter.ptd"});
  options.fine_tune = load_state_dict(folder + "/tuned.ptd");
  CHECK(load_adapter(LogicalTensors(both), peft, options) == 1);
  CHECK(first(*both, "m.weight") == 9 && first(*both, "m.lora_a") == 3 && first(*both, "m.lora_b") == 8);

  const auto result = nothrow::load_adapter(tensors, folder + "/none");
  CHECK(!result.ok() && result.error().kind() == ErrorKind::FileAccess);
}

/// The file is the one that Python wrote of the same tensors, and a file that is refused leaves the old one.
void test_saving(const std::string& folder) {
  const auto adapter = Adapter::read(folder + "/2.ptd");
  StateDict tensors;
  for (const NamedTensor& tensor : adapter->tensors()) {
    tensors[tensor.name] = adapter->tensor(tensor.name);
  }
  const std::vector<std::string> foundation{folder + "/foundation.ptd"};
  const std::string path = folder + "/saved.ptd";
  const std::string expected = read(folder + "/2.ptd");
  CHECK(save_adapter(path, tensors, foundation, 1) == expected.size());
  CHECK(read(path) == expected);

  const auto refuses = [&](ErrorKind kind, const StateDict& given, const std::string& target, double scale) {
    const auto saved = nothrow::save_adapter(target, given, foundation, scale);
    return !saved.ok() && saved.error().kind() == kind && read(path) == expected;
  };
  CHECK(refuses(ErrorKind::Adapter, tensors, path, NAN));
  CHECK(refuses(ErrorKind::Adapter, {}, path, 1));
  CHECK(refuses(ErrorKind::Adapter, {*tensors.begin()}, path, 1)); // one of a pair
  CHECK(refuses(ErrorKind::UnsupportedData, {{"m.lora_a", nullptr}}, path, 1));
  CHECK(refuses(ErrorKind::OutputPath, tensors, foundation.front(), 1));
  CHECK(refuses(ErrorKind::FileAccess, tensors, folder + "/none/saved.ptd", 1));
  auto infinite = tensors;
  infinite["m.lora_a"] = executorch::extension::make_tensor_ptr({2, 5}, std::vector<float>(10, INFINITY));
  CHECK(refuses(ErrorKind::Update, infinite, path, 1));
  infinite["m.lora_a"] = executorch::extension::make_tensor_ptr({1, 5}, std::vector<float>(5));
  CHECK(refuses(ErrorKind::Layout, infinite, path, 1));
  CHECK(fails(ErrorKind::Adapter, [&] { save_adapter(path, tensors, {folder + "/1.ptd"}, 1); }));
  CHECK(read(path) == expected);
}

/// An adapter is rewritten for another foundation.
void test_binding(const std::string& folder) {
  const std::string one = folder + "/1.ptd";
  const auto base = BlobCache::open({folder + "/tuned.ptd"});
  const auto cache = BlobCache::open({folder + "/adapter.ptd"}, BlobCache::Mode::Private, base);
  const LogicalTensors tensors(cache);
  const std::string bound = folder + "/bound.ptd";
  const std::vector<std::string> tuned{folder + "/tuned.ptd"};
  CHECK(nothrow::bind_adapter(one, bound, tuned).ok());
  CHECK(Adapter::read(bound)->foundation() == foundation_fingerprint(tuned));
  load_adapter(tensors, bound);
  CHECK(first(*cache, "m.lora_a") == 1 && first(*cache, "m.lora_b") == 1);
  CHECK(Adapter::read(bound)->scale() == 1 && bind_adapter(bound, folder + "/2b.ptd", tuned, 2) > 0);
  CHECK(Adapter::read(folder + "/2b.ptd")->scale() == 2);
  CHECK(fails(ErrorKind::OutputPath, [&] { bind_adapter(one, one, tuned); }));
  CHECK(fails(ErrorKind::OutputPath, [&] { bind_adapter(one, tuned[0], tuned); }));
  CHECK(fails(ErrorKind::Adapter, [&] { bind_adapter(folder + "/peft", bound, tuned); }));
  CHECK(fails(ErrorKind::Adapter, [&] { bind_adapter(one, bound, {one}); }));
  CHECK(fails(ErrorKind::Adapter, [&] { bind_adapter(one, bound, tuned, NAN); }));
  CHECK(Adapter::read(bound)->foundation() == foundation_fingerprint(tuned));
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  const std::string folder = argv[1];
  test_exchange_in_threads(folder);
  test_merges_in_threads(folder);
  test_fine_tune(folder);
  test_peft_folder(folder);
  test_saving(folder);
  test_binding(folder);
}
