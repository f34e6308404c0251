#include "logical/fixed_weights.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "format/constants.h"
#include "logical/numbers.h"
#include "os/text.h"
#include "os/unaligned.h"

namespace blobstore::internal {
namespace {

using Shape = std::pair<int8_t, std::vector<int64_t>>;
using Shapes = std::vector<Shaped>;

/// A tensor that a method has without a name of the model: a constant, or an external tensor keyed by its contents.
struct Nameless {
  std::string method;
  Shape shape;
  bool is_inside;
};

/// A delegate of another backend, which packs weights without blobstore.
struct Foreign {
  std::string method;
  std::string backend;
  std::optional<size_t> count; // of its constants; empty if that cannot be known
  std::set<uint64_t> sizes; // of its constants in bytes; empty unless all are known
};

constexpr size_t kMostListed = 20;

uint64_t elements(const Shape& shape) {
  uint64_t product = 1;
  for (const int64_t size : shape.second) {
    product *= static_cast<uint64_t>(size);
  }
  return product;
}

/// Whether a constant may be a weight, rather than a number or an index that lowering made.
/// @param known whether a tensor of the model has the same type and sizes.
bool may_be_weight(const Shape& shape, bool known) {
  const bool floats = is_floating(shape.first);
  const bool many = elements(shape) > 1;
  return known ? floats || many : many && (floats || shape.first == kChar || shape.first == kByte);
}

std::string place_of(bool is_inside) {
  return is_inside ? "inside: pass ExecutorchBackendConfig(external_constants=True) to to_executorch(), and no "
                     "keep_small to save_programs()"
                   : "under keys made of their contents: pass names= to save_programs() or dedup_programs()";
}

Shape shape_of(const Layout& layout) {
  return {layout.scalar_type, {layout.sizes.begin(), layout.sizes.end()}};
}

/// The names by which XNNPACK takes constants from outside its payload: hashes of their contents.
std::set<std::string> hash_keys(const Part& payload) {
  const std::string_view text(reinterpret_cast<const char*>(payload.data), payload.size);
  std::set<std::string> keys;
  for (size_t at = 0; at < text.size();) {
    size_t length = text.compare(at, 6, "scale_") == 0 ? 70 : 64;
    if (!is_hash_key(text.substr(at, length))) {
      length = 0;
    } else {
      keys.emplace(text.substr(at, length));
    }
    at += std::max<size_t>(length, 1);
  }
  return keys;
}

Foreign foreign_of(const ProgramParts& parts, const ProgramParts::Delegate& delegate) {
  Foreign out{delegate.method, delegate.backend, std::nullopt, {}};
  const Part& payload = delegate.payload;
  // XNNPACK's header: 4 bytes, a magic of 4, the header's length (2), offset and size of the flatbuffer (4, 4) and of
  // constants behind it (4, 8). Other constants are named by the hash of their contents.
  if (delegate.backend != "XnnpackBackend" || payload.size < 30 || std::memcmp(payload.data + 4, "XH00", 4) != 0) {
    return out;
  }
  if (load<uint64_t>(payload.data + 22) != 0) {
    return out;
  }
  const std::set<std::string> keys = hash_keys(payload);
  out.count = keys.size();
  for (const std::string& key : keys) {
    const auto inside = parts.named_data.find(key);
    if (inside == parts.named_data.end()) {
      out.sizes.clear();
      break;
    }
    out.sizes.insert(inside->second.size);
  }
  return out;
}

std::vector<Foreign> foreign_in(const ProgramParts& parts) {
  std::vector<Foreign> found;
  for (const ProgramParts::Delegate& delegate : parts.delegates) {
    if (delegate.backend != kBackendId) {
      if (Foreign other = foreign_of(parts, delegate); other.count != 0) {
        found.push_back(std::move(other));
      }
    }
  }
  return found;
}

/// Each kind once.
std::vector<Nameless> nameless_in(const ProgramParts& parts) {
  std::vector<Nameless> found;
  std::set<std::pair<uint32_t, std::pair<std::string, Shape>>> seen; // external tensors have the number 0
  const auto add = [&](uint32_t number, Nameless one) {
    if (seen.insert({number, {one.method, one.shape}}).second) {
      found.push_back(std::move(one));
    }
  };
  for (const auto& [number, constant] : parts.constants) {
    add(number, {constant.method, shape_of(constant.layout), true});
  }
  for (const ProgramParts::External& tensor : parts.externals) {
    if (is_content_key(tensor.key) && tensor.layout && !tensor.is_mutable) {
      add(0, {tensor.method, shape_of(*tensor.layout), false});
    }
  }
  return found;
}

/// The names of the tensors that blobs in the program are made of, by their keys.
std::map<std::string, std::vector<std::string>> names_inside(const std::string& path, const ProgramParts& parts) {
  std::map<std::string, std::vector<std::string>> names;
  for (const auto& [key, blob] : parts.named_data) {
    if (!is_records(key, blob.data, blob.size)) {
      continue;
    }
    for (const Record& record : parse_records(blob.data, blob.size, path).records) {
      std::vector<std::string>& of_blob = names[record.key];
      of_blob.clear();
      for (const SourceTensor& source : record.sources) {
        of_blob.push_back(source.name);
      }
    }
  }
  return names;
}

/// What is out of reach of an update, in one program.
class Finder {
 public:
  Finder(
      const std::string& path,
      const TakenWeights& taken,
      const Shapes& shapes,
      bool whole,
      std::vector<std::string>& problems)
      : path_(path), taken_(taken), shapes_(shapes), whole_(whole), problems_(problems) {}

  /// Weights of blobstore's delegates that the program contains. @param names of the tensors of its blobs.
  void find_embedded(const std::map<std::string, std::vector<std::string>>& names) const {
    std::set<std::string_view> given;
    for (const Shaped& one : shapes_) {
      given.insert(one.name);
    }
    Ordered<NameSet> found;
    for (const auto& [key, method] : taken_.delegated()) {
      const size_t at = key.rfind('@');
      if (at == std::string::npos || taken_.cache().find(key) != nullptr) {
        continue;
      }
      const auto known = names.find(key);
      for (const std::string& name :
           known == names.end() ? std::vector<std::string>{key.substr(0, at)} : known->second) {
        if (whole_ || given.count(name) != 0) {
          found[method][name];
        }
      }
    }
    for (const auto& [method, inside] : found) {
      problems_.push_back(
          format("{} has {} inside: pass a tag to BlobStorePartitioner", where_in(method, path_), listed(inside)));
    }
  }

  /// Weights that delegates of other backends packed.
  void find_packed_elsewhere(const std::vector<Foreign>& all) const {
    std::set<uint64_t> nbytes;
    for (const Shaped& one : shapes_) {
      if (one.scalar_type >= 0 && !taken_.in_data_files(one.name) && !taken_.in_delegates(one.name)) {
        nbytes.insert(item_size(one.scalar_type) * elements({one.scalar_type, one.sizes}));
      }
    }
    std::vector<Foreign> found; // by method and backend, with their constants
    for (const Foreign& one : all) {
      const bool fits =
          std::any_of(one.sizes.begin(), one.sizes.end(), [&](uint64_t size) { return nbytes.count(size) != 0; });
      if (!whole_ && !fits && (nbytes.empty() || !one.sizes.empty())) {
        continue;
      }
      const auto same = std::find_if(found.begin(), found.end(), [&](const Foreign& other) {
        return other.method == one.method && other.backend == one.backend;
      });
      if (same == found.end()) {
        found.push_back(one);
      } else {
        same->count = same->count && one.count ? std::optional(*same->count + *one.count) : std::nullopt;
      }
    }
    for (const Foreign& one : found) {
      problems_.push_back(format(
          "{} has {} that {} packed: lower it with BlobStorePartitioner",
          where_in(one.method, path_),
          one.count ? format("{} constants", *one.count) : "weights",
          one.backend));
    }
  }

  /// Weights without names, recognized by dtype and shape unless their tensor is known to be in another place.
  void find_constants(const std::vector<Nameless>& all) const {
    const auto& externals = taken_.externals();
    const bool knows_names = !taken_.delegated().empty() ||
        std::any_of(externals.begin(), externals.end(), [](const auto& one) { return !is_content_key(one.first); });
    const std::map<Shape, std::vector<std::string>> by_shape = candidates();
    std::vector<Constants> named;
    std::vector<Constants> unnamed;
    const auto at = [](std::vector<Constants>& list, const Nameless& one) -> Constants& {
      const auto known = std::find_if(list.begin(), list.end(), [&](const Constants& found) {
        return found.method == one.method && found.is_inside == one.is_inside;
      });
      return known != list.end() ? *known : list.emplace_back(Constants{one.method, one.is_inside, {}, 0});
    };
    for (const Nameless& one : all) {
      const auto known = by_shape.find(one.shape);
      if (known != by_shape.end() && may_be_weight(one.shape, true)) {
        Constants& found = at(named, one);
        for (const std::string& name : known->second) {
          found.names[name];
        }
      } else if (whole_ && !knows_names && may_be_weight(one.shape, false)) {
        ++at(unnamed, one).count;
      }
    }
    for (const Constants& one : named) {
      problems_.push_back(format(
          "{} has constants like {} {}", where_in(one.method, path_), listed(one.names), place_of(one.is_inside)));
    }
    for (const Constants& one : unnamed) {
      problems_.push_back(format(
          "{} has {} constants without names {}", where_in(one.method, path_), one.count, place_of(one.is_inside)));
    }
  }

 private:
  /// Those of one method, in one place.
  struct Constants {
    std::string method;
    bool is_inside = false;
    NameSet names;
    size_t count = 0;
  };

  /// The tensors of the update that constants may be, by dtype and shape.
  std::map<Shape, std::vector<std::string>> candidates() const {
    std::map<Shape, std::vector<std::string>> by_shape;
    for (const Shaped& one : shapes_) {
      const bool elsewhere =
          taken_.in_data_files(one.name) || (!taken_.delegated().empty() && taken_.index().find(one.name) == nullptr);
      // a matrix may be both in a delegate and in an embedding; for vectors, equal lengths prove nothing
      if (one.scalar_type >= 0 && !elsewhere && (one.sizes.size() > 1 || !taken_.in_delegates(one.name))) {
        by_shape[{one.scalar_type, one.sizes}].emplace_back(one.name);
      }
    }
    return by_shape;
  }

  const std::string& path_;
  const TakenWeights& taken_;
  const Shapes& shapes_;
  const bool whole_;
  std::vector<std::string>& problems_;
};

} // namespace

std::string listed(const NameSet& names) {
  Names views;
  for (const auto& item : names) {
    views.push_back(item.first);
  }
  return quoted(views, kMostListed);
}

std::string where_in(const std::string& method, const std::string& path) {
  return method.empty() ? path : format("method '{}' of {}", method, path);
}

void find_fixed_weights(
    const std::string& path,
    const ProgramParts* parts,
    const TakenWeights& taken,
    const std::vector<Shaped>& tensors,
    bool whole,
    std::vector<std::string>& problems) {
  const Finder finder(path, taken, tensors, whole, problems);
  finder.find_embedded(
      parts == nullptr ? std::map<std::string, std::vector<std::string>>() : names_inside(path, *parts));
  if (parts != nullptr) {
    finder.find_packed_elsewhere(foreign_in(*parts));
    finder.find_constants(nameless_in(*parts));
  }
}

} // namespace blobstore::internal
