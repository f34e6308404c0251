// LoRA adapters in Java.
#include <blobstore/adapters.h>

#include "crossing.h"

namespace blobstore::java {
namespace {

struct Info {
  std::shared_ptr<const Adapter> adapter;
};

} // namespace

template <>
struct Mirror<Info> {
  static constexpr const char* name = "AdapterInfo";
  static auto fields(const Info& info) {
    const Adapter& adapter = *info.adapter;
    std::vector<std::string> pairs;
    for (const auto& [key, value] : adapter.metadata()) {
      pairs.push_back(key);
      pairs.push_back(value);
    }
    std::vector<std::string> adapted;
    for (const LoraPair& pair : adapter.pairs()) {
      adapted.push_back(pair.module);
    }
    std::vector<std::string> reasons;
    for (const Error& error : adapter.problems()) {
      reasons.push_back(error.reason());
    }
    return std::make_tuple(adapter.path(), adapter.foundation(), adapter.scale(), pairs, adapted, reasons);
  }
};

namespace {

std::string fingerprint(const Paths& paths) {
  return foundation_fingerprint(paths.all);
}

Info read(const Path& path) {
  return {Adapter::read(path.text)};
}

uint64_t save(const Path& path, const StateDict& tensors, const Paths& foundation, double scale) {
  return save_adapter(path.text, tensors, foundation.all, scale);
}

uint64_t load(const LogicalTensors& tensors, const Path& path, std::optional<double> scale, double strength) {
  AdapterOptions options;
  options.program_scale = scale;
  options.strength = strength;
  return load_adapter(tensors, path.text, options);
}

uint64_t load_all(
    const LogicalTensors& tensors,
    const Paths& paths,
    const std::vector<double>& strengths,
    std::optional<double> scale) {
  if (paths.all.size() != strengths.size()) {
    throw Error(
        ErrorKind::Adapter,
        std::to_string(paths.all.size()) + " adapters and " + std::to_string(strengths.size()) +
            " strengths were given");
  }
  std::vector<AdapterShare> adapters;
  for (size_t i = 0; i < strengths.size(); ++i) {
    adapters.push_back({paths.all[i], strengths[i]});
  }
  return load_adapters(tensors, adapters, scale);
}

std::unique_ptr<MergedAdapter> merge(const LogicalTensors& tensors, const Path& path, double alpha) {
  MergeOptions options;
  options.alpha = alpha;
  return merge_adapter(tensors, path.text, options);
}

} // namespace

std::vector<Row> adapter_rows() {
  return {
      row<&fingerprint>("foundationFingerprint"),
      row<&read>("readAdapter"),
      row<&save>("saveAdapter"),
      row<&load>("loadAdapter"),
      row<&set_adapter_strength>("setAdapterStrength"),
      row<&load_all>("loadAdapters"),
      row<&set_adapter_strengths>("setAdapterStrengths"),
      row<&merge>("mergeAdapter"),
      row<&MergedAdapter::weights>("mergedWeights"),
      row<&MergedAdapter::generation>("mergedGeneration"),
      row<&MergedAdapter::undone>("mergedUndone"),
      row<&MergedAdapter::undo>("mergedUndo")};
}

} // namespace blobstore::java
