#include "adapters/peft_names.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include <blobstore/error.h>

#include "adapters/adapter_file.h"
#include "logical/numbers.h"
#include "os/text.h"

namespace blobstore::internal {
namespace {

constexpr int kMostWrappers = 16; // names of modules that an exporter puts before those of the model

struct Renamed {
  std::string_view hf;
  std::string_view llama;
};
constexpr Renamed kLlama[] = {
    {"self_attn.q_proj", "attention.wq"},
    {"self_attn.k_proj", "attention.wk"},
    {"self_attn.v_proj", "attention.wv"},
    {"self_attn.o_proj", "attention.wo"},
    {"mlp.gate_proj", "feed_forward.w1"},
    {"mlp.up_proj", "feed_forward.w3"},
    {"mlp.down_proj", "feed_forward.w2"}};

struct Fused {
  std::string_view whole;
  std::vector<const char*> parts; // in the order of their rows
};

const std::vector<Fused>& all_fused() {
  static const auto* fused =
      new std::vector<Fused>{{"qkv_proj", {"q_proj", "k_proj", "v_proj"}}, {"gate_up_proj", {"gate_proj", "up_proj"}}};
  return *fused;
}

bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

bool is_digits(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

/// The parts of a name between dots.
std::vector<std::string_view> parts_of(std::string_view name) {
  std::vector<std::string_view> parts;
  for (size_t start = 0; start <= name.size();) {
    const size_t end = std::min(name.find('.', start), name.size());
    parts.push_back(name.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

/// Whether a name has the number of a layer before its last part.
bool has_layer(std::string_view name) {
  const std::vector<std::string_view> parts = parts_of(name);
  return std::any_of(parts.begin(), std::prev(parts.end()), is_digits);
}

/// What Llama's checkpoints call a module of Hugging Face's model; the same name if they have no other.
std::string llama_name(const std::string& name) {
  if (name == "lm_head") {
    return "output";
  }
  const std::string_view inside = starts_with(name, "model.") ? std::string_view(name).substr(6) : name;
  const std::vector<std::string_view> parts = parts_of(inside);
  if (parts.size() == 4 && parts[0] == "layers" && is_digits(parts[1])) {
    for (const Renamed& one : kLlama) {
      if (format("{}.{}", parts[2], parts[3]) == one.hf) {
        return format("layers.{}.{}", parts[1], one.llama);
      }
    }
  }
  return name;
}

/// Whether a module of a program makes the q or k of a Llama, so that the order of its rows matters.
bool is_rotated(std::string_view module) {
  const std::vector<std::string_view> parts = parts_of(module);
  const size_t count = parts.size();
  return count >= 4 && parts[count - 4] == "layers" && is_digits(parts[count - 3]) && parts[count - 2] == "attention" &&
      (parts[count - 1] == "wq" || parts[count - 1] == "wk");
}

/// The modules of programs, by each end of their names.
class Modules {
 public:
  explicit Modules(const PeftTarget& target) : target_(target) {
    for (const auto& [module, rows] : target.rows) {
      size_t dot = module.find('.');
      for (int i = 0; i < kMostWrappers && dot != std::string::npos; ++i, dot = module.find('.', dot + 1)) {
        ends_[module.substr(dot + 1)].push_back(&module);
      }
    }
  }

  /// The module that PEFT calls `name`; empty if there is none.
  std::optional<std::string> find(const std::string& name) const {
    for (const std::string& form : forms(name)) {
      if (target_.rows.count(form) != 0) {
        return form;
      }
      const auto ends = has_layer(form) ? ends_.find(form) : ends_.end();
      if (ends != ends_.end() && ends->second.size() > 1) {
        const std::string all = joined(ends->second, ", ", [](const std::string* one) { return format("'{}'", *one); });
        throw_error(ErrorKind::Adapter, "module '{}' may be any of {} in {}", name, all, target_.name);
      }
      if (ends != ends_.end()) {
        return *ends->second.front();
      }
    }
    return std::nullopt;
  }

  std::string at(const std::string& name) const {
    std::optional<std::string> found = find(name);
    if (!found) {
      throw_error(
          ErrorKind::KeyNotFound,
          "module '{}' has no adapter in {}, which has no {}",
          name,
          target_.name,
          in_quotes(forms(name), " or "));
    }
    return *std::move(found);
  }

 private:
  static std::vector<std::string> forms(const std::string& name) {
    std::vector<std::string> all{
        name,
        std::string(kPeftPrefix) + name,
        starts_with(name, "model.") ? name.substr(std::string_view("model.").size()) : name,
        llama_name(name)};
    std::vector<std::string> once;
    for (std::string& one : all) {
      if (std::find(once.begin(), once.end(), one) == once.end()) {
        once.push_back(std::move(one));
      }
    }
    return once;
  }

  const PeftTarget& target_;
  std::map<std::string, std::vector<const std::string*>> ends_;
};

/// Rows in Hugging Face's order (for each head: first halves, second halves) as neighbours, for Llama's own code.
TensorView rows_as_llama(const TensorView& rows, int64_t head_dim) {
  TensorView made = make_tensor(rows.scalar_type, rows.sizes);
  const size_t width = rows.sizes[0] == 0 ? 0 : rows.nbytes / static_cast<size_t>(rows.sizes[0]);
  const int64_t half = head_dim / 2;
  for (int64_t row = 0; row < rows.sizes[0] && width > 0; ++row) {
    const int64_t within = row % head_dim;
    const int64_t from = row - within + within % 2 * half + within / 2;
    std::memcpy(filling(made) + static_cast<size_t>(row) * width, rows.data + static_cast<size_t>(from) * width, width);
  }
  return made;
}

TensorView some_rows(const TensorView& tensor, int64_t first, int64_t count) {
  const size_t width = tensor.sizes[0] == 0 ? 0 : tensor.nbytes / static_cast<size_t>(tensor.sizes[0]);
  TensorView part = tensor;
  part.sizes[0] = count;
  part.data += static_cast<size_t>(first) * width;
  part.nbytes = static_cast<size_t>(count) * width;
  return part;
}

/// Collects the tensors of an adapter under the names of programs.
class Placing {
 public:
  Placing(const PeftFolder& folder, const PeftTarget& target) : folder_(folder), target_(target), modules_(target) {}

  void place(const PeftPair& pair) {
    if (const auto given = target_.given.find(pair.module); given != target_.given.end()) {
      const std::string_view weight = given->second;
      add(pair.module, pair, pair.b, ends_with(weight, ".weight") ? weight.substr(0, weight.size() - 7) : weight);
      return;
    }
    const std::string_view last = parts_of(pair.module).back();
    const auto& fused = all_fused();
    const auto known = std::find_if(fused.begin(), fused.end(), [&](const Fused& one) { return one.whole == last; });
    if (known == fused.end() || modules_.find(pair.module)) {
      const std::string module = modules_.at(pair.module);
      add(module, pair, pair.b, module);
      return;
    }
    const std::string before = pair.module.substr(0, pair.module.size() - last.size());
    std::vector<std::string> parts;
    int64_t rows = 0;
    for (const char* part : known->parts) {
      parts.push_back(modules_.at(before + part));
      rows += target_.rows.at(parts.back());
    }
    if (rows != pair.b.sizes[0]) {
      throw_error(
          ErrorKind::Layout,
          "'{}' gives {} features, and its parts in {} together {}",
          pair.b_key,
          pair.b.sizes[0],
          target_.name,
          rows);
    }
    int64_t first = 0;
    for (const std::string& part : parts) {
      const int64_t count = target_.rows.at(part);
      add(part, pair, some_rows(pair.b, first, count), part);
      first += count;
    }
  }

  NamedViews tensors;
  std::map<std::string, double> factors;

 private:
  /// @param rotated the module of the program, whose name says whether its rows are reordered.
  void add(const std::string& module, const PeftPair& pair, TensorView b, std::string_view rotated) {
    if (!seen_.insert(module).second) {
      throw_error(
          ErrorKind::Adapter, "two modules of PEFT are module '{}' of the program, one is '{}'", module, pair.module);
    }
    if (is_rotated(rotated)) {
      if (!target_.head_dim) {
        throw_error(
            ErrorKind::Adapter,
            "the rows of module '{}' lie in another order if the program rotates neighbouring elements, and {} does "
            "not "
            "show whether it does; import the adapter with `blobstore adapters import --params`",
            rotated,
            target_.name);
      }
      if (const int64_t head = *target_.head_dim; head != 0) {
        if (b.sizes[0] == 0 || b.sizes[0] % head != 0) {
          throw_error(ErrorKind::Layout, "module '{}' has {} rows, which are no heads of {}", module, b.sizes[0], head);
        }
        b = rows_as_llama(b, head);
      }
    }
    tensors.emplace_back(module + ".lora_a.weight", pair.a);
    tensors.emplace_back(module + ".lora_b.weight", std::move(b));
    factors[module + ".lora_b.weight"] = folder_.factor(pair);
  }

  const PeftFolder& folder_;
  const PeftTarget& target_;
  Modules modules_;
  std::set<std::string> seen_;
};

} // namespace

std::shared_ptr<const Adapter> adapter_for(const Adapter& folder, const PeftTarget& target) {
  const std::shared_ptr<const PeftFolder>& source = AdapterAccess::impl(folder).peft;
  Placing placing(*source, target);
  for (const PeftPair& pair : source->pairs()) {
    try {
      placing.place(pair);
    } catch (const Error& error) {
      throw_error_in(error.kind(), folder.path(), "{}", error.what());
    }
  }
  return AdapterAccess::of_peft(folder.path(), source, placing.tensors, std::move(placing.factors));
}

} // namespace blobstore::internal
