// An application that has ExecuTorch's Module and nothing of blobstore, until it loads libblobstore_backend.so.
//
//   stock_client STEP...
//
// Each step prints a line: what a call computed, a number, or why it failed.
//
//   load FILE.so             dlopen, and look up the functions for C
//   module FILE.pte FILE.ptd make a Module, and load "forward"; "-" for no data file
//   run                      call it on ones, of a shape [1, 8]
//   open FILE.ptd, share FILE.ptd, copy FILE.ptd TARGET.ptd, update FILE.ptd, revert, generation, followers, close
//   commit FILE.ptd DELTA    in another process, which loads the library, change a working copy

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

#include <blobstore_backend.h> // types alone

namespace {

using executorch::extension::Module;
using executorch::runtime::Error;

struct Backend {
  explicit Backend(const char* path) : library(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (library == nullptr) {
      std::printf("%s\n", dlerror());
      std::exit(1);
    }
    find(open, "blobstore_open");
    find(open_working_copy, "blobstore_open_working_copy");
    find(make_working_copy, "blobstore_make_working_copy");
    find(close, "blobstore_close");
    find(update, "blobstore_update");
    find(revert, "blobstore_revert");
    find(generation, "blobstore_generation");
    find(followers, "blobstore_followers");
    find(error, "blobstore_error");
    find(delegate_error, "blobstore_delegate_error");
  }

  template <typename Function>
  void find(Function*& function, const char* name) {
    void* const symbol = dlsym(library, name);
    std::memcpy(&function, &symbol, sizeof symbol);
  }

  void* library;
  decltype(blobstore_open)* open = nullptr;
  decltype(blobstore_open_working_copy)* open_working_copy = nullptr;
  decltype(blobstore_make_working_copy)* make_working_copy = nullptr;
  decltype(blobstore_close)* close = nullptr;
  decltype(blobstore_update)* update = nullptr;
  decltype(blobstore_revert)* revert = nullptr;
  decltype(blobstore_generation)* generation = nullptr;
  decltype(blobstore_followers)* followers = nullptr;
  decltype(blobstore_error)* error = nullptr;
  decltype(blobstore_delegate_error)* delegate_error = nullptr;
};

class Client {
 public:
  /// Do a step and print what came of it. @returns how many arguments it took.
  int step(const std::string& name, char** arguments) {
    if (name == "load") {
      backend_ = std::make_unique<Backend>(arguments[0]);
      std::printf("loaded\n");
      return 1;
    }
    if (name == "module") {
      const bool data = std::strcmp(arguments[1], "-") != 0;
      module_ = data ? std::make_unique<Module>(arguments[0], arguments[1]) : std::make_unique<Module>(arguments[0]);
      const Error error = module_->load_method("forward");
      const char* reason = backend_ ? backend_->delegate_error() : "";
      std::printf(error == Error::Ok ? "loaded\n" : "error %d: %s\n", static_cast<int>(error), reason);
      return 2;
    }
    if (name == "run") {
      run();
      return 0;
    }
    return name == "commit" ? commit(arguments[0], arguments[1]) : weights(name, arguments);
  }

 private:
  void run() {
    const auto outputs = module_->forward(executorch::extension::ones({1, 8}));
    if (!outputs.ok()) {
      std::printf("error %d\n", static_cast<int>(outputs.error()));
      return;
    }
    const auto tensor = outputs->at(0).toTensor();
    for (ssize_t i = 0; i < tensor.numel(); ++i) {
      std::printf(i == 0 ? "%.9g" : " %.9g", static_cast<double>(tensor.const_data_ptr<float>()[i]));
    }
    std::printf("\n");
  }

  int weights(const std::string& name, char** arguments) {
    if (name == "open") {
      return said(backend_->open(arguments, 1, &weights_), 1);
    }
    if (name == "share") {
      return said(backend_->open_working_copy(arguments[0], &weights_), 1);
    }
    if (name == "copy") {
      return said(backend_->make_working_copy(arguments, 1, arguments[1]), 2);
    }
    if (name == "update") {
      return said(backend_->update(weights_, arguments[0]), 1);
    }
    if (name == "revert") {
      return said(backend_->revert(weights_), 0);
    }
    if (name == "close") {
      backend_->close(weights_);
      std::printf("closed\n");
      return 0;
    }
    const bool followers = name == "followers";
    std::printf(
        "%llu\n",
        static_cast<unsigned long long>(followers ? backend_->followers(weights_) : backend_->generation(weights_)));
    return 0;
  }

  int commit(char* copy, char* delta) const {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      blobstore_weights* own = nullptr;
      const bool done = backend_->open_working_copy(copy, &own) == 0 && backend_->update(own, delta) == 0;
      _exit(done ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    std::printf("another process: %d\n", status);
    return 2;
  }

  int said(int code, int arguments) const {
    if (code == BLOBSTORE_OK) {
      std::printf("done\n");
    } else {
      std::printf("refused %d: %s\n", code, backend_->error());
    }
    return arguments;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Module> module_;
  blobstore_weights* weights_ = nullptr;
};

} // namespace

int main(int argc, char** argv) {
  Client client;
  for (int i = 1; i < argc; ++i) {
    i += client.step(argv[i], argv + i + 1);
  }
  return 0;
}
