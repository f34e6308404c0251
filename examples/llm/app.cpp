// An application with one language model, two adapters of PEFT, training and releases, as app.py is in Python.
//
//   app DEVICE URL NAME=FOLDER...
//
// DEVICE has the current release, a program with its data files and a program that trains its adapter, as
// docs/language-models.md makes them. URL is that of the index, such as http://server/llama/latest/index.json. Adapters
// that were trained here are kept in DEVICE, and are there when the application starts again, however it ended.
//
// Standard input has one command a line, and standard output one answer:
//
//   ask english once | german hello    two users at the same time
//   train english once upon a time     20 steps on a text, published to the running model
//   update                             take the newest release

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <future>
#include <iostream>
#include <map>

#include <blobstore/adapters.h>
#include <blobstore/releases.h>
#include <blobstore/runners.h>
#include <blobstore/training.h>

#include "platform.h" // yours: the runner, such as ExecuTorch's TextLLMRunner, its tokenizer, and the downloader

namespace {

using blobstore::BlobCache;

constexpr int kUsers = 2, kSteps = 20, kTokens = 12;
constexpr double kScale = 2; // what the branches of the program multiply with: lora_alpha / r

/// The texts before and after a separator. Without one, all is before it.
std::pair<std::string, std::string> cut(const std::string& text, const std::string& separator) {
  const size_t at = std::min(text.find(separator), text.size());
  return {text.substr(0, at), text.substr(std::min(at + separator.size(), text.size()))};
}

/// The model of the current release, with the adapters of the users.
class App {
 public:
  App(std::string device, std::string url, std::map<std::string, std::string> adapters)
      : device_(std::move(device)), url_(std::move(url)), adapters_(std::move(adapters)) {
    if (!std::filesystem::exists(device_ + "/current")) {
      blobstore::pull(url_, device_, download);
    }
    open();
  }

  std::string ask(std::string requests) {
    GenerationConfig config;
    config.max_new_tokens = kTokens;
    config.temperature = 0;
    std::vector<std::future<std::string>> users;
    while (!requests.empty()) {
      auto [request, others] = cut(requests, " | ");
      users.push_back(std::async(std::launch::async, [&, words = cut(request, " ")] {
        return runners_->generate(words.second, config, {words.first});
      }));
      requests = std::move(others);
    }
    std::string answers;
    for (auto& user : users) {
      answers += (answers.empty() ? "" : " | ") + user.get();
    }
    return answers;
  }

  std::string train(const std::string& what) {
    const auto [name, text] = cut(what, " ");
    const std::vector<int64_t> ids = encode(files_, text);
    const auto foundation = BlobCache::open({files_ + "train_foundation.ptd"});
    const auto adapter = BlobCache::open({files_ + "train_adapter.ptd"}, BlobCache::Mode::Private, foundation);
    blobstore::TrainingProgram training(blobstore::Program::load(files_ + "train.pte", adapter));
    const blobstore::LogicalTensors start(layer());
    blobstore::load_adapter(start, adapters_.at(name));
    for (const auto& [tensor, parameter] : training.named_parameters()) { // goes on from the adapter as it is
      std::memcpy(parameter->mutable_data_ptr(), start.value(tensor)->const_data_ptr(), parameter->nbytes());
    }
    const auto row = [](auto begin, auto end) {
      return executorch::extension::make_tensor_ptr({1, int(end - begin)}, std::vector<int64_t>(begin, end));
    };
    const auto tokens = row(ids.begin(), ids.end() - 1), following = row(ids.begin() + 1, ids.end());
    blobstore::AdamW optimizer({0.01});
    float loss = 0;
    for (int step = 0; step < kSteps; ++step) {
      loss = training.step(optimizer, {tokens, following}).tensor(0)->const_data_ptr<float>()[0];
    }
    blobstore::save_adapter(trained(name), training.named_parameters(), {files_ + "foundation.ptd"}, kScale);
    runners_->set_adapter(name, trained(name));
    adapters_[name] = trained(name);
    return name + " " + std::to_string(loss);
  }

  std::string update() {
    blobstore::pull(url_, device_, download);
    open();
    return release_->version();
  }

 private:
  void open() {
    runners_.reset();
    blobstore::OpenOptions options;
    options.data = std::vector<std::string>{"foundation.ptd"};
    release_ = blobstore::Release::open(device_, options);
    files_ = release_->path() + "/";
    std::vector<blobstore::RunnerOnCache<TextRunner>> pairs;
    for (int user = 0; user < kUsers; ++user) {
      pairs.push_back({make_runner(files_), layer()});
    }
    runners_ = std::make_unique<blobstore::Runners<TextRunner>>(std::move(pairs));
    for (auto& [name, path] : adapters_) {
      path = std::filesystem::exists(trained(name)) ? trained(name) : path;
      runners_->set_adapter(name, path);
    }
  }

  std::shared_ptr<BlobCache> layer() const {
    return BlobCache::open({files_ + "model_lora.ptd"}, BlobCache::Mode::Private, release_->cache());
  }
  std::string trained(const std::string& name) const { return device_ + "/" + name + ".trained.ptd"; }

  std::string device_, url_, files_;
  std::map<std::string, std::string> adapters_;
  std::shared_ptr<blobstore::Release> release_;
  std::unique_ptr<blobstore::Runners<TextRunner>> runners_;
};

} // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: app DEVICE URL NAME=FOLDER...\n";
    return 64;
  }
  std::map<std::string, std::string> adapters;
  for (int i = 3; i < argc; ++i) {
    adapters.insert(cut(argv[i], "="));
  }
  try {
    App app(argv[1], argv[2], std::move(adapters));
    for (std::string line; std::getline(std::cin, line);) {
      const auto [command, rest] = cut(line, " ");
      std::cout << (command == "ask" ? app.ask(rest) : command == "train" ? app.train(rest) : app.update()) << '\n';
      std::cout.flush();
    }
  } catch (const std::exception& error) {
    std::cerr << "app: " << error.what() << '\n';
    return 1;
  }
}
