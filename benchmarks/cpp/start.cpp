// A process that loads "forward" and runs it, in one of the ways that an application can.
//
//   start stock - PROGRAM.pte [DATA.ptd]...         ExecuTorch's Module
//   start stock PACKED PROGRAM.pte [DATA.ptd]...    the same, with its own option packed_cache_path
//   start ours - PROGRAM.pte [DATA.ptd]...          a program on a cache
//   start ours FOLDER PROGRAM.pte [DATA.ptd]...     the same, with a packed store
//
// It does what the lines on standard input say, and prints one line for each:
//
//   load [BYTES]            seconds; with how many bytes to read ahead, if not the default
//   run TIMES               seconds, and a digest of the outputs
//   write SOURCE TARGET     seconds to write the bytes of a file that is mapped, and to wait until the disk has them
//   read FILE               seconds to read the bytes of a file in order
//   touch FILE              seconds to map a file and read a byte of each cache line in order

#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/platform/runtime.h>

#include <blobstore/cache.h>
#include <blobstore/packed.h>
#include <blobstore/program.h>

namespace et = executorch::runtime;
using executorch::extension::Module;
using executorch::extension::TensorPtr;

namespace {

using Values = std::vector<et::EValue>;

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "start: %s\n", message.c_str());
  std::exit(1);
}

void check(et::Error error, const char* what) {
  if (error != et::Error::Ok) {
    fail(std::string(what) + ": " + et::to_string(error));
  }
}

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Ones for each input tensor.
std::vector<TensorPtr> inputs_of(const et::MethodMeta& meta) {
  std::vector<TensorPtr> inputs;
  for (size_t i = 0; i < meta.num_inputs(); ++i) {
    const auto info = meta.input_tensor_meta(i);
    check(info.error(), "an input");
    inputs.push_back(executorch::extension::ones({info->sizes().begin(), info->sizes().end()}, info->scalar_type()));
  }
  return inputs;
}

/// FNV-1a.
void add(uint64_t& digest, const et::EValue& value) {
  const auto& tensor = value.toTensor();
  const auto* bytes = tensor.const_data_ptr<uint8_t>();
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    digest = (digest ^ bytes[i]) * 0x100000001b3;
  }
}

class Start {
 public:
  virtual ~Start() = default;
  virtual void load(std::optional<uint64_t> read_ahead) = 0;
  virtual et::MethodMeta meta() = 0;
  virtual void run(const Values& inputs, uint64_t* digest) = 0;
};

class Stock : public Start {
 public:
  Stock(std::string packed, std::string program, std::vector<std::string> data)
      : packed_(std::move(packed)), program_(std::move(program)), data_(std::move(data)) {}

  void load(std::optional<uint64_t>) override {
    module_ = std::make_unique<Module>(program_, data_, Module::LoadMode::Mmap);
    if (packed_.empty()) {
      check(module_->load(), "the program");
    } else {
      et::BackendOption options[2] = {{"packed_cache_path", {}}, {"weight_cache_enabled", true}};
      std::array<char, et::kMaxOptionValueLength> path{};
      if (packed_.size() >= path.size()) {
        fail(packed_ + " is too long");
      }
      std::memcpy(path.data(), packed_.data(), packed_.size());
      options[0].value = path;
      et::LoadBackendOptionsMap map;
      check(map.set_options("XnnpackBackend", {options, 2}), "options");
      check(module_->load(map), "the program");
    }
    check(module_->load_method("forward"), "the method");
  }

  et::MethodMeta meta() override {
    const auto found = module_->method_meta("forward");
    check(found.error(), "the method's description");
    return *found;
  }

  void run(const Values& inputs, uint64_t* digest) override {
    const auto outputs = module_->forward(inputs);
    check(outputs.error(), "the call");
    if (digest != nullptr) {
      for (const auto& output : *outputs) {
        add(*digest, output);
      }
    }
  }

 private:
  const std::string packed_; // empty for none
  const std::string program_;
  const std::vector<std::string> data_;
  std::unique_ptr<Module> module_;
};

class Ours : public Start {
 public:
  Ours(std::string packed, std::string program, std::vector<std::string> data)
      : packed_(std::move(packed)), program_(std::move(program)), data_(std::move(data)) {}

  void load(std::optional<uint64_t> read_ahead) override {
    blobstore::PackedOptions options;
    options.read_ahead = read_ahead.value_or(options.read_ahead);
    const auto store = packed_.empty() ? nullptr : blobstore::PackedStore::open(packed_, options);
    const auto cache = blobstore::BlobCache::open(data_, blobstore::BlobCache::Mode::Private, nullptr, store);
    method_ = blobstore::Program::load(program_, cache)->load_method("forward");
    if (store != nullptr) {
      for (const auto& [reason, count] : store->stats().reasons) {
        fail("packed to the heap: " + reason);
      }
    }
  }

  et::MethodMeta meta() override { return method_->meta(); }

  void run(const Values& inputs, uint64_t* digest) override {
    const auto outputs = method_->execute(inputs);
    if (digest != nullptr) {
      for (const auto& output : outputs) {
        add(*digest, output);
      }
    }
  }

 private:
  const std::string packed_; // empty for none
  const std::string program_;
  const std::vector<std::string> data_;
  std::shared_ptr<blobstore::Method> method_;
};

/// A file that is open and mapped.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) : descriptor(open(path.c_str(), O_RDONLY)) {
    struct stat about{};
    if (descriptor < 0 || fstat(descriptor, &about) != 0) {
      fail(path + " cannot be read");
    }
    size = static_cast<size_t>(about.st_size);
    void* const pages = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
    if (pages == MAP_FAILED) {
      fail(path + " cannot be mapped");
    }
    bytes = static_cast<const uint8_t*>(pages);
  }
  ~MappedFile() {
    munmap(const_cast<uint8_t*>(bytes), size);
    close(descriptor);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const int descriptor;
  size_t size = 0;
  const uint8_t* bytes = nullptr;
};

void read(const std::string& path) {
  const MappedFile file(path);
  std::vector<uint8_t> piece(1 << 20);
  ssize_t count = 0;
  while ((count = ::read(file.descriptor, piece.data(), piece.size())) > 0) {
  }
  if (count < 0) {
    fail(path + " cannot be read");
  }
}

void touch(const std::string& path) {
  const MappedFile file(path);
  uint64_t sum = 0;
  for (size_t at = 0; at < file.size; at += 64) {
    sum += file.bytes[at];
  }
  static volatile uint64_t used;
  used = sum;
}

void write(const std::string& from, const std::string& to) {
  const MappedFile source(from);
  const int target = open(to.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (target < 0) {
    fail(to + " cannot be written");
  }
  for (size_t done = 0; done < source.size;) {
    const ssize_t count = ::write(target, source.bytes + done, source.size - done);
    if (count <= 0) {
      fail(to + " cannot be written");
    }
    done += static_cast<size_t>(count);
  }
  if (fsync(target) != 0) {
    fail(to + " cannot be synced");
  }
  close(target);
}

void serve(Start& start) {
  std::vector<TensorPtr> tensors;
  Values inputs;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    words >> command;
    if (command == "load") {
      uint64_t bytes = 0;
      const bool given = static_cast<bool>(words >> bytes);
      std::printf("%.9f\n", seconds([&] { start.load(given ? std::optional(bytes) : std::nullopt); }));
      tensors = inputs_of(start.meta());
      inputs.assign(tensors.begin(), tensors.end());
    } else if (command == "run") {
      int times = 0;
      words >> times;
      uint64_t digest = 0xcbf29ce484222325;
      const double taken = seconds([&] {
        for (int i = 0; i < times; ++i) {
          start.run(inputs, i + 1 < times ? nullptr : &digest);
        }
      });
      std::printf("%.9f %" PRIx64 "\n", taken, digest);
    } else if (command == "write") {
      std::string from, to;
      words >> from >> to;
      std::printf("%.9f\n", seconds([&] { write(from, to); }));
    } else if (command == "read" || command == "touch") {
      std::string path;
      words >> path;
      std::printf("%.9f\n", seconds([&] { command == "read" ? read(path) : touch(path); }));
    } else {
      fail("unknown command " + line);
    }
    std::fflush(stdout);
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    fail("stock|ours PACKED|- PROGRAM [DATA]...");
  }
  const std::string packed = std::strcmp(argv[2], "-") == 0 ? "" : argv[2];
  const std::vector<std::string> data(argv + 4, argv + argc);
  et::runtime_init();
  try {
    std::unique_ptr<Start> start;
    if (std::strcmp(argv[1], "stock") == 0) {
      start = std::make_unique<Stock>(packed, argv[3], data);
    } else {
      start = std::make_unique<Ours>(packed, argv[3], data);
    }
    std::printf("ready\n");
    std::fflush(stdout);
    serve(*start);
  } catch (const blobstore::Error& error) {
    fail(error.what());
  }
  return 0;
}
