#include "adapters/peft_folder.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <blobstore/error.h>

#include "format/format_error.h"
#include "format/json.h"
#include "format/safetensors.h"
#include "format/utf8.h"
#include "logical/numbers.h"
#include "os/folders.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr uint64_t kMostConfig = 1 << 24; // bytes
constexpr double kMostAlpha = 1e300;
constexpr size_t kMostForms = 256; // of expressions in alpha_pattern

constexpr size_t kMostShown = 80; // bytes of a value, in a message

// Every field of PEFT's LoraConfig (0.21) is decided on purpose: `Config::read_field` honours it, it does not change
// what a trained adapter computes, or it is refused by its name. A field that is unknown to this version is refused,
// unless it is switched off. https://huggingface.co/docs/peft/package_reference/lora describes the fields.

constexpr std::string_view kNoEffect[] = {
    // which modules have an adapter: the tensors show it
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    // used while training only
    "lora_dropout",
    "velora_config",
    "inference_mode",
    "runtime_config",
    // how the adapter began; `init_lora_weights` shows whether the base was changed, too
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "loftq_config",
    // they matter only beside another field, which is refused
    "megatron_core",
    "qalora_group_size",
    // where it came from
    "auto_mapping",
    "peft_version",
    "revision"};

struct Reason {
  std::string_view name;
  const char* what;
};
constexpr Reason kRefused[] = {
    {"use_dora", "weights are decomposed into magnitude and direction"},
    {"modules_to_save", "whole modules were trained"},
    {"trainable_token_indices", "rows of the embeddings were trained"},
    {"lora_bias", "the second matrix has a bias"},
    {"fan_in_fan_out", "the weights of the base are stored transposed"},
    {"layer_replication", "layers of the base are repeated"},
    {"target_parameters", "parameters were adapted, and not modules"},
    {"megatron_config", "the layers are split over several devices"},
    {"alora_invocation_tokens", "the adapter acts on a part of the tokens only"},
    {"arrow_config", "a router chooses among several adapters"},
    {"use_qalora", "the first matrix takes averages of groups of inputs"},
    {"use_bdlora", "the matrices are block diagonal"},
    {"kasa_config", "the weights of the base were truncated, and there is a diagonal between the matrices"},
    {"monteclora_config", "the matrices are drawn at random"},
    {"ensure_weight_tying", "the adapters of tied modules are one"}};

/// The tensors that belong to no pair, by parts of their keys.
constexpr Reason kStrays[] = {
    {".lora_embedding_", "an adapter of an embedding"},
    {".lora_magnitude_vector", "the magnitude of use_dora"},
    {".lora_B.bias", "the bias of lora_bias"},
    // Of these two, PEFT saves the weights beside the pairs.
    {"lm_head.base_layer.weight",
     "of an adapter of lm_head, saved with its weight; save it without save_embedding_layers"},
    {".base_layer.weight", "of an adapter of an embedding"},
    {".base_layer.", "a bias of the base model"},
    {".modules_to_save", "a module of modules_to_save"}};

/// The first byte behind the character that begins at a place of text.
size_t character_end(std::string_view text, size_t at) {
  do {
    ++at;
  } while (at < text.size() && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80);
  return at;
}

/// An expression of alpha_pattern: characters, of which a plain dot stands for any.
class Pattern {
 public:
  /// @param text letters, digits, `_`, `-`, dots, characters beyond ASCII, other characters behind a backslash, and
  ///   anchors.
  /// @returns empty for any other expression.
  static std::optional<Pattern> of(std::string_view text) {
    Pattern made;
    made.at_start_ = !text.empty() && text.front() == '^';
    text.remove_prefix(made.at_start_ ? 1 : 0);
    for (size_t i = 0; i < text.size();) {
      const char c = text[i];
      if (c == '$' && i + 1 == text.size()) {
        break;
      }
      const bool escaped = c == '\\' && i + 1 < text.size() && !is_word(text[i + 1]);
      if (!escaped && !is_word(c) && !is_beyond_ascii(c) && c != '.' && c != '-') {
        return std::nullopt;
      }
      i += escaped ? 1 : 0;
      const size_t end = character_end(text, i);
      made.any_.push_back(c == '.');
      made.characters_.emplace_back(text.substr(i, end - i));
      i = end;
    }
    return made.characters_.empty() ? std::nullopt : std::optional<Pattern>(made);
  }

  /// How many characters it has, and which of them are plain dots.
  const std::vector<bool>& form() const { return any_; }

  /// As PEFT matches it: as the end of a module's name, behind a dot or as all of it.
  bool matches(std::string_view module) const {
    size_t stop = module.size();
    for (size_t i = characters_.size(); i-- > 0;) {
      if (stop == 0) {
        return false;
      }
      size_t start = stop - 1;
      while (start > 0 && (static_cast<uint8_t>(module[start]) & 0xc0) == 0x80) {
        --start;
      }
      if (!any_[i] && module.substr(start, stop - start) != characters_[i]) {
        return false;
      }
      stop = start;
    }
    return stop == 0 || (!at_start_ && module[stop - 1] == '.');
  }

 private:
  static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  }
  static bool is_beyond_ascii(char c) { return static_cast<uint8_t>(c) >= 0x80; }

  bool at_start_ = false;
  std::vector<std::string> characters_;
  std::vector<bool> any_;
};

/// What adapter_config.json says.
class Config {
 public:
  explicit Config(std::string path) : path_(std::move(path)) {
    const File file(path_, /*writable=*/false);
    const uint64_t size = file.size();
    if (size == 0 || size > kMostConfig) {
      throw_error_in(ErrorKind::InvalidFile, path_, "{} bytes cannot be a configuration", size);
    }
    const Mapping map(file, 0, static_cast<size_t>(size), Mapping::Kind::ReadOnly);
    const std::string_view text(reinterpret_cast<const char*>(map.data()), static_cast<size_t>(size));
    try {
      if (!is_utf8(text)) {
        throw_format_error("not JSON: it is not UTF-8");
      }
      read(text);
    } catch (const FormatError& error) {
      throw_error_in(ErrorKind::InvalidFile, path_, "{}", error.what());
    }
    if (type_ != "'LORA'") {
      throw_error_in(ErrorKind::Adapter, path_, "peft_type is {}; only adapters of type 'LORA' can be loaded", type_);
    }
    ranks_.insert(rank_);
  }

  /// That of modules without an entry in the patterns, and without use_rslora.
  double plain_scale() const { return alpha_ / static_cast<double>(rank_); }

  /// What it says of the base and the task, in UTF-8.
  const std::map<std::string, std::string>& origin() const { return origin_; }

  /// The factor of the product of a pair. @throws Error Adapter: the configuration has no such rank.
  double scale(const std::string& module, int64_t rank) const {
    if (ranks_.count(static_cast<uint64_t>(rank)) == 0) {
      throw_error_in(
          ErrorKind::Adapter,
          path_,
          "module '{}' has rank {}, but r and rank_pattern have {}",
          module,
          rank,
          joined(ranks_, ", ", [](uint64_t one) { return std::to_string(one); }));
    }
    const auto known =
        std::find_if(alphas_.begin(), alphas_.end(), [&](const auto& one) { return one.first.matches(module); });
    const double alpha = known == alphas_.end() ? alpha_ : known->second;
    return alpha / (rslora_ ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
  }

 private:
  void read(std::string_view text) {
    JsonReader json(text, "the file");
    if (!json.at_object()) {
      throw_format_error("expected a JSON object");
    }
    json.object([&](const std::string& name) { read_field(name, json.skip()); });
    json.end();
  }

  /// @param text the value.
  void read_field(const std::string& name, std::string_view text) {
    JsonReader json(text);
    if (name == "peft_type") {
      type_ = shown(text);
    } else if (name == "r") {
      rank_ = rank(name, text);
    } else if (name == "lora_alpha") {
      alpha_ = alpha(name, text);
    } else if (name == "use_rslora") {
      rslora_ = json.take_literal("true");
      if (!rslora_ && !json.take_literal("false")) {
        throw_format_error("use_rslora must be true or false, found {}", shown(text));
      }
    } else if (name == "rank_pattern") {
      pattern(name, text, [&](const std::string&, const std::string& what, std::string_view value) {
        ranks_.insert(rank(what, value));
      });
    } else if (name == "alpha_pattern") {
      pattern(name, text, [&](const std::string& key, const std::string& what, std::string_view value) {
        add_alpha(key, alpha(what, value));
      });
    } else if (name == "init_lora_weights") {
      check_initial(text);
    } else if (name == "bias") {
      if (const std::string bias = shown(text); bias != "'none'") {
        throw_error_in(
            ErrorKind::Adapter,
            path_,
            "bias is {}: biases of the base were trained, which no adapter file holds",
            bias);
      }
    } else if (name == "base_model_name_or_path" || name == "task_type") {
      if (json.at_string()) {
        std::string value = json.string();
        if (is_utf8(value)) {
          origin_[name] = std::move(value);
        }
      }
    } else if (std::find(std::begin(kNoEffect), std::end(kNoEffect), name) == std::end(kNoEffect) && is_on(json)) {
      const auto known = std::find_if(
          std::begin(kRefused), std::end(kRefused), [&](const Reason& refused) { return refused.name == name; });
      throw_error_in(
          ErrorKind::Adapter,
          path_,
          "{} cannot be honoured: {}; merge the adapter into its base with PEFT",
          name,
          known != std::end(kRefused)
              ? known->what
              : "this field is unknown to this version, and may change what the adapter computes");
    }
  }

  void add_alpha(const std::string& key, double alpha) {
    const std::optional<Pattern> expression = Pattern::of(key);
    if (!expression) {
      throw_error_in(
          ErrorKind::Adapter,
          path_,
          "alpha_pattern has the expression '{}'; only names of modules, or ends of them, can be honoured",
          key);
    }
    forms_.insert(expression->form());
    if (forms_.size() > kMostForms) {
      throw_error_in(
          ErrorKind::Adapter,
          path_,
          "the expressions in alpha_pattern differ in length or in the places of their dots in more than {} ways",
          kMostForms);
    }
    alphas_.emplace_back(*expression, alpha);
  }

  /// Initial values that leave the weights of the base as they are.
  void check_initial(std::string_view text) const {
    const std::string initial = shown(text);
    for (const char* one : {"true", "false", "null", "'gaussian'", "'eva'", "'orthogonal'"}) {
      if (initial == one) {
        return;
      }
    }
    throw_error_in(
        ErrorKind::Adapter,
        path_,
        "init_lora_weights is {}, which changes the weights of the base, too; convert the adapter with "
        "path_initial_model_for_weight_conversion when you save it, or merge it",
        initial);
  }

  /// Whether the next value is other than null, false, zero and empty.
  static bool is_on(JsonReader& json) {
    bool any = false;
    if (json.at_object()) {
      json.object([&](const std::string&) {
        any = true;
        json.skip();
      });
      return any;
    }
    if (json.at_array()) {
      json.array([&] {
        any = true;
        json.skip();
      });
      return any;
    }
    if (json.at_string()) {
      return !json.string().empty();
    }
    if (json.take_literal("null") || json.take_literal("false")) {
      return false;
    }
    const std::optional<double> number = json.real();
    return !number || *number != 0;
  }

  /// @param entry called with each key, what messages call its value, and the text of that.
  template <typename Entry>
  static void pattern(const std::string& name, std::string_view text, Entry entry) {
    JsonReader json(text);
    if (json.take_literal("null")) {
      return;
    }
    if (!json.at_object()) {
      throw_format_error("{} must map names of modules to numbers, found {}", name, shown(text));
    }
    json.object([&](const std::string& key) { entry(key, format("{}['{}']", name, key), json.skip()); });
  }

  static uint64_t rank(const std::string& name, std::string_view text) {
    const std::optional<uint64_t> found = JsonReader(text).size();
    if (!found || *found == 0 || *found >= uint64_t{1} << 31) {
      throw_format_error("{} must be a positive integer, found {}", name, shown(text));
    }
    return *found;
  }

  static double alpha(const std::string& name, std::string_view text) {
    const std::optional<double> found = JsonReader(text).real();
    if (!found || std::abs(*found) > kMostAlpha) {
      throw_format_error("{} must be a finite number, found {}", name, shown(text));
    }
    return *found;
  }

  /// A value for messages.
  static std::string shown(std::string_view text) {
    JsonReader json(text);
    const std::string whole = json.at_string() ? format("'{}'", json.string()) : std::string(text);
    return whole.substr(0, kMostShown);
  }

  std::string path_;
  std::string type_ = "missing"; // as messages show it
  uint64_t rank_ = 8;
  double alpha_ = 8;
  bool rslora_ = false;
  std::map<std::string, std::string> origin_;
  std::set<uint64_t> ranks_; // all that modules may have
  std::vector<std::pair<Pattern, double>> alphas_;
  std::set<std::vector<bool>> forms_; // of their expressions
};

struct Halves {
  const SafetensorsEntry* a = nullptr;
  const SafetensorsEntry* b = nullptr;
};

/// The two keys of each module, in the order of the file.
std::vector<std::pair<std::string, Halves>> halves_in(const SafetensorsTable& table, const std::string& path) {
  std::vector<std::pair<std::string, Halves>> modules;
  std::map<std::string, size_t> known;
  for (const SafetensorsEntry& entry : table.entries) {
    const std::string_view key = entry.key;
    const bool is_a = ends_with(key, ".lora_A.weight");
    if (!is_a && !ends_with(key, ".lora_B.weight")) {
      const char* what = "no part of a LoRA pair";
      for (const Reason& stray : kStrays) {
        if (key.find(stray.name) != std::string_view::npos) {
          what = stray.what;
          break;
        }
      }
      throw_error_in(ErrorKind::Adapter, path, "'{}' cannot be honoured: it is {}", key, what);
    }
    const std::string_view whole = key.substr(0, key.size() - std::string_view(".lora_A.weight").size());
    const bool prefixed = whole.substr(0, kPeftPrefix.size()) == kPeftPrefix; // some files have the names without it
    std::string module(prefixed ? whole.substr(kPeftPrefix.size()) : whole);
    const auto [at, is_new] = known.emplace(module, modules.size());
    if (is_new) {
      modules.emplace_back(std::move(module), Halves{});
    }
    Halves& both = modules[at->second].second;
    const SafetensorsEntry*& half = is_a ? both.a : both.b;
    if (half != nullptr) {
      throw_error_in(ErrorKind::Adapter, path, "'{}' and '{}' belong to one module", half->key, key);
    }
    half = &entry;
  }
  if (modules.empty()) {
    throw_error_in(ErrorKind::Adapter, path, "there are no LoRA tensors");
  }
  return modules;
}

TensorView tensor_in(
    const SafetensorsEntry& entry, const std::string& path, const std::shared_ptr<const Mapping>& map) {
  if (!entry.layout || !is_floating(entry.layout->scalar_type)) {
    throw_error_in(ErrorKind::UnsupportedData, path, "'{}' has dtype {}, expected a float", entry.key, entry.dtype);
  }
  return {
      entry.layout->scalar_type,
      {entry.layout->sizes.begin(), entry.layout->sizes.end()},
      map->data() + entry.start,
      static_cast<size_t>(entry.end - entry.start),
      map};
}

/// The scale that most pairs have, the first of them if there are several, and not 0 if there is another.
double common_scale(const std::vector<PeftPair>& pairs) {
  double common = 0;
  std::ptrdiff_t most = 0;
  for (const PeftPair& pair : pairs) {
    const auto same =
        std::count_if(pairs.begin(), pairs.end(), [&](const PeftPair& one) { return one.scale == pair.scale; });
    if (pair.scale != 0 && same > most) {
      most = same;
      common = pair.scale;
    }
  }
  return common;
}

} // namespace

PeftFolder::PeftFolder(const std::string& path) {
  const Config config(path + "/adapter_config.json");
  const std::string name = path + "/adapter_model.safetensors";
  int failed = 0;
  const std::vector<std::string> names = names_in(path, failed);
  const auto has = [&](std::string_view one) { return std::find(names.begin(), names.end(), one) != names.end(); };
  if (has("adapter_model.bin") && !has("adapter_model.safetensors")) {
    throw_error_in(
        ErrorKind::Adapter, path, "adapter_model.bin is a pickle, which may run code; save it as safetensors");
  }
  file_ = File(name, /*writable=*/false);
  size_ = file_.size();
  if (size_ == 0) {
    throw_error_in(ErrorKind::InvalidFile, name, "the file is empty");
  }
  const auto map = std::make_shared<const Mapping>(file_, 0, static_cast<size_t>(size_), Mapping::Kind::ReadOnly);
  const SafetensorsTable table = read_safetensors(name, map->data(), size_);
  for (const auto& [module, both] : halves_in(table, name)) {
    if (both.a == nullptr || both.b == nullptr) {
      throw_error_in(
          ErrorKind::Adapter,
          name,
          "'{}' has no {} beside it",
          (both.a == nullptr ? both.b : both.a)->key,
          both.a == nullptr ? "lora_A" : "lora_B");
    }
    PeftPair pair{module, both.a->key, both.b->key, tensor_in(*both.a, name, map), tensor_in(*both.b, name, map)};
    if (pair.a.sizes.size() != 2 || pair.b.sizes.size() != 2 || pair.a.sizes[0] != pair.b.sizes[1]) {
      throw_error_in(
          ErrorKind::Layout,
          name,
          "'{}' {} and '{}' {} must be matrices with one rank",
          pair.a_key,
          to_string(pair.a.sizes),
          pair.b_key,
          to_string(pair.b.sizes));
    }
    pair.scale = config.scale(module, pair.a.sizes[0]);
    pairs_.push_back(std::move(pair));
  }
  scale_ = common_scale(pairs_);
  plain_scale_ = config.plain_scale();
  origin_ = config.origin();
}

} // namespace blobstore::internal
