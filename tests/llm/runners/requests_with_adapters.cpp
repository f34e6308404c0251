// Requests to a language model, each with an adapter of its own.
//
//   requests_with_adapters STEP FOLDER
//
// FOLDER has live/model.pte with its data files, and the adapters one.ptd and two.ptd. Each line that is printed is a
// text, or why the library refused.

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <blobstore/adapters.h>
#include <blobstore/nothrow.h>
#include <blobstore/runners.h>

#include "letter_runner.h"

namespace {

using blobstore::BlobCache;
using blobstore::Conversation;
using blobstore::RequestOptions;
using Runners = blobstore::Runners<LetterRunner>;
using Pairs = std::vector<blobstore::RunnerOnCache<LetterRunner>>;

GenerationConfig config(int32_t tokens = 12) {
  GenerationConfig made;
  made.max_new_tokens = tokens;
  return made;
}

Pairs pairs(const std::string& folder, size_t count) {
  const std::string live = folder + "/live/";
  const auto foundation = BlobCache::open({live + "foundation.ptd"});
  Pairs made;
  for (size_t i = 0; i < count; ++i) {
    made.push_back(
        {std::make_shared<LetterRunner>(live + "model.pte", live + "foundation.ptd"),
         BlobCache::open({live + "model_lora.ptd"}, BlobCache::Mode::Private, foundation)});
  }
  return made;
}

std::unique_ptr<Runners> open(const std::string& folder, size_t count) {
  auto runners = std::make_unique<Runners>(pairs(folder, count));
  runners->set_adapter("one", folder + "/one.ptd");
  runners->set_adapter("two", folder + "/two.ptd");
  return runners;
}

void print(const std::string& line) {
  std::printf("%s\n", line.c_str());
}

void conversation(const std::string& folder) {
  const auto runners = open(folder, 1);
  const auto talk = std::make_shared<Conversation>();
  for (const char* adapter : {"one", "one", "two", "two"}) {
    print(runners->generate("hi", config(), {adapter, 1, talk}));
  }
  print(talk->text());
  print(std::to_string(runners->stats().continued));
  const auto stop = std::make_shared<blobstore::Stop>();
  print(runners->generate("hi", config(), {"two", 1, nullptr, stop}, [&](const std::string&) { stop->set(); }));
  print("'" + runners->generate("hi", config(), {"two", 1, nullptr, stop}) + "'");
}

/// As an application does that is compiled without exceptions.
void without_exceptions(const std::string& folder) {
  const auto runners = blobstore::nothrow::make_runners(pairs(folder, 1));
  if (!runners.ok() || !blobstore::nothrow::set_adapter((*runners)->queue(), "two", folder + "/two.ptd").ok()) {
    print("refused");
    return;
  }
  print(blobstore::nothrow::generate(**runners, "once", config(), {"one"}).error().what());
  print(blobstore::nothrow::generate(**runners, std::string(200, 'x'), config()).error().what());
  print(blobstore::nothrow::generate(**runners, "once", config(), {"two"}).get());
  print(blobstore::nothrow::set_adapter((*runners)->queue(), "x", folder + "/x.ptd").ok() ? "done" : "refused");
  print(blobstore::nothrow::make_runners(Pairs()).error().what());
  Pairs bad = pairs(folder, 1);
  bad.front().runner = std::make_shared<LetterRunner>(folder + "/nothing.pte", folder + "/nothing.ptd");
  print(blobstore::nothrow::make_runners(std::move(bad)).error().what());
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    return 64;
  }
  const std::string step = argv[1];
  const std::string folder = argv[2];
  if (step == "conversation") {
    conversation(folder);
  } else if (step == "without_exceptions") {
    without_exceptions(folder);
  } else {
    return 64;
  }
  return 0;
}
