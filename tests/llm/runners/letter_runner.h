// A runner with the interface of ExecuTorch's TextLLMRunner, whose headers the wheel does not have. Its tokens are
// letters and digits, each of them one token, and it always takes the likeliest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>

struct GenerationConfig {
  bool echo = true;
  int32_t max_new_tokens = -1;
  int32_t num_bos = 0;
  int32_t num_eos = 0;
  float temperature = 0.8f; // not used
};

class LetterRunner {
 public:
  using Error = executorch::runtime::Error;

  LetterRunner(const std::string& program, const std::string& data) : module_(program, data) {}

  /// The tokens of a text; fewer than it has letters if one is no token.
  static std::vector<int64_t> encode(const std::string& text) {
    std::vector<int64_t> tokens;
    for (const char letter : text) {
      if (const size_t token = kLetters.find(letter); token != std::string::npos) {
        tokens.push_back(static_cast<int64_t>(token));
      }
    }
    return tokens;
  }

  Error load() { return module_.load_method("forward"); }
  void reset() { position_ = 0; }
  void stop() { stopped_ = true; }

  Error generate(
      const std::string& prompt,
      const GenerationConfig& config,
      const std::function<void(const std::string&)>& on_token) {
    std::vector<int64_t> tokens = encode(prompt);
    if (tokens.size() != prompt.size()) {
      return Error::InvalidArgument;
    }
    if (position_ + static_cast<int64_t>(tokens.size()) + config.max_new_tokens > kContext) {
      return Error::InvalidArgument;
    }
    if (config.echo) {
      on_token(prompt);
    }
    stopped_ = false;
    for (int32_t made = 0; made < config.max_new_tokens && !stopped_; ++made) {
      const auto size = static_cast<int32_t>(tokens.size());
      const auto outputs = module_.forward(
          {executorch::extension::make_tensor_ptr({1, size}, std::move(tokens)),
           executorch::extension::make_tensor_ptr({1}, std::vector<int64_t>{position_})});
      if (!outputs.ok()) {
        return outputs.error();
      }
      position_ += size;
      const auto& logits = outputs->at(0).toTensor();
      const float* const last = logits.const_data_ptr<float>() + logits.numel() - kLetters.size();
      const auto best = std::max_element(last, last + kLetters.size()) - last;
      tokens = {best};
      on_token(std::string(1, kLetters[static_cast<size_t>(best)]));
    }
    return Error::Ok;
  }

 private:
  static constexpr int64_t kContext = 128;
  inline static const std::string kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

  executorch::extension::Module module_;
  int64_t position_ = 0;
  bool stopped_ = false;
};
