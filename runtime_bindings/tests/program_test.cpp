// Runs programs through the C++ API: what calls own, copy and refuse.
//
//   program_test FOLDER
//
// planned.pte and unplanned.pte add 1 to their input of float[4] in place, and return it and its double; unplanned.pte
// has no memory for the input. channels_last.pte takes a channels-last float[1, 2, 2, 2] and returns its absolute.
// text.pte returns the string "a text", an int and a float.

#include <sys/mman.h>

#include <blobstore/program.h>

#include "helpers.h"

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there
using executorch::extension::make_tensor_ptr;
using executorch::extension::TensorPtr;

std::shared_ptr<Method> load(const std::string& path) {
  return Program::load(path, BlobCache::open({}))->load_method("forward");
}

const std::vector<float> kNumbers = {1, 2, 3, 4};
const std::vector<float> kMore = {2, 3, 4, 5};
const std::vector<float> kDoubled = {4, 6, 8, 10};

/// A run takes a line, and inputs are changed only where the caller allows it.
void inputs_in_place(const std::string& path) {
  const auto method = load(path);
  const Outputs outputs = method->execute({make_tensor_ptr({4}, kNumbers)});
  CHECK(outputs.size() == 2 && numbers(outputs[0].toTensor()) == kMore && numbers(outputs[1].toTensor()) == kDoubled);

  const TensorPtr input = make_tensor_ptr({4}, kNumbers);
  CHECK(numbers(*method->execute({input}).tensor(1)) == kDoubled);
  CHECK(numbers(*input) == kNumbers);
  CHECK(numbers(*method->execute({input}, {SIZE_MAX, {false}}).tensor(1)) == kDoubled);
  CHECK(numbers(*input) == kNumbers);
  CHECK(numbers(*method->execute({input}, {SIZE_MAX, {true}}).tensor(1)) == kDoubled);
  CHECK(numbers(*input) == kMore);

  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(page != MAP_FAILED);
  std::memcpy(page, kNumbers.data(), 16);
  CHECK(mprotect(page, 4096, PROT_READ) == 0); // a write to it would end the process
  const TensorPtr constant = make_tensor_ptr({4}, page);
  CHECK(numbers(*method->execute({constant}).tensor(1)) == kDoubled);
}

/// Results own their memory, with or without the Outputs, the method and later calls.
void outputs_own_their_memory(const std::string& path) {
  auto method = load(path);
  Outputs outputs = method->execute({make_tensor_ptr({4}, kNumbers)});
  const Outputs copy = outputs;
  const TensorPtr tensor = outputs.tensor(1);
  (void)method->execute({make_tensor_ptr({4}, {0.0f, 0.0f, 0.0f, 0.0f})});
  CHECK(numbers(outputs[1].toTensor()) == kDoubled);
  outputs = {};
  method = nullptr;
  CHECK(numbers(copy[1].toTensor()) == kDoubled && numbers(*tensor) == kDoubled);
  CHECK(copy.tensor(2) == nullptr);
}

void none_of_the_outputs(const std::string& path) {
  CHECK(load(path)->execute({make_tensor_ptr({4}, kNumbers)}, {0, {}}).empty());
}

/// tests/runtime/test_programs.py has what else is refused.
void refused_inputs(const std::string& folder) {
  const auto method = load(folder + "/planned.pte");
  const TensorPtr none = make_tensor_ptr({4}, nullptr);
  refused(ErrorKind::Input, "has no data", [&] { (void)method->execute({none}); });
  CHECK(numbers(*method->execute({make_tensor_ptr({4}, kNumbers)}).tensor(1)) == kDoubled);
}

/// The order of dimensions in memory counts, not how it is written.
void order_of_dimensions(const std::string& folder) {
  const auto method = load(folder + "/channels_last.pte");
  const std::vector<float> eight = {0, 1, 2, 3, 4, 5, 6, 7};
  const TensorPtr rows = make_tensor_ptr({1, 2, 2, 2}, eight);
  const TensorPtr last = make_tensor_ptr({1, 2, 2, 2}, eight, {0, 2, 3, 1});
  const TensorPtr same = make_tensor_ptr({1, 2, 2, 2}, eight, {2, 0, 3, 1}); // the first dimension has one element
  refused(ErrorKind::Input, "has its dimensions in another order", [&] { (void)method->execute({rows}); });
  for (const TensorPtr& given : {last, same}) {
    const TensorPtr output = method->execute({given}).tensor(0);
    CHECK(numbers(*output) == eight && output->dim_order()[3] == 1);
  }
}

void other_values(const std::string& folder) {
  const auto method = load(folder + "/text.pte");
  const Outputs outputs = method->execute({});
  CHECK(
      outputs.size() == 3 && outputs[0].toString() == "a text" && outputs[1].toInt() == 7 &&
      outputs[2].toDouble() == 0.5);
  CHECK(outputs.tensor(0) == nullptr);
}

/// Memory of a method lives as long as a tensor over it.
void memory_of_a_method(const std::string& path) {
  TensorPtr memory;
  {
    const auto method = load(path);
    memory = method->output_memory(1);
    CHECK(numbers(*memory) == std::vector<float>(4));
    (void)method->execute({make_tensor_ptr({4}, kNumbers)});
  }
  CHECK(numbers(*memory) == kDoubled);
}

/// The program keeps its method "forward", also while several threads load it, and does not keep itself.
void forward_of_a_program(const std::string& folder) {
  auto program = Program::load(folder + "/planned.pte", BlobCache::open({}));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 20; ++call) {
        CHECK(numbers(*program->forward(make_tensor_ptr({4}, kNumbers)).tensor(1)) == kDoubled);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const TensorPtr input = make_tensor_ptr({4}, kNumbers);
  CHECK(program->forward({input}, {1, {true}}).size() == 1 && numbers(*input) == kMore);
  refused(ErrorKind::Input, "takes 1 input, 2 were given", [&] { (void)program->forward(input, input); });
  refused(ErrorKind::Input, "takes 1 input, 0 were given", [&] { (void)program->forward(); });
  const Outputs outputs = program->forward(input);
  const auto method = program->load_method("forward"); // another one, which keeps the program
  const std::weak_ptr<Program> alive = program;
  program.reset();
  CHECK(!alive.expired() && numbers(*method->execute({make_tensor_ptr({4}, kNumbers)}).tensor(1)) == kDoubled);
  CHECK(outputs.size() == 2);
  program = Program::load(folder + "/text.pte", BlobCache::open({}));
  const Outputs others = program->forward();
  CHECK(others[1].toInt() == 7);
  const std::weak_ptr<Program> gone = program;
  program.reset();
  CHECK(gone.expired());
  CHECK(alive.lock() != nullptr);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  const std::string folder = argv[1];
  for (const char* name : {"/planned.pte", "/unplanned.pte"}) {
    inputs_in_place(folder + name);
    outputs_own_their_memory(folder + name);
    none_of_the_outputs(folder + name);
    memory_of_a_method(folder + name);
  }
  refused_inputs(folder);
  order_of_dimensions(folder);
  other_values(folder);
  forward_of_a_program(folder);
}
