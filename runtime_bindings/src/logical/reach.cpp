#include "logical/reach.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>

#include <blobstore/delegate.h>

#include "delegate/delegate_payload.h"
#include "delegate/served.h"
#include "format/constants.h"
#include "format/flatbuffer.h"
#include "format/text_hash.h"
#include "logical/numbers.h"
#include "logical/similar_names.h"
#include "os/file.h"
#include "os/unaligned.h"
#include "program/loaded_program.h"

namespace blobstore::internal {

using Shape = std::pair<int8_t, std::vector<int64_t>>;
using Shapes = std::vector<Shaped>;

/// Values by text, in the order in which the texts were first seen.
template <typename Value>
class Ordered {
 public:
  Value& operator[](const std::string& key) {
    const auto [at, is_new] = places_.emplace(key, items_.size());
    if (is_new) {
      items_.emplace_back(key, Value());
    }
    return items_[at->second].second;
  }
  bool contains(const std::string& key) const { return places_.count(key) != 0; }
  bool empty() const { return items_.empty(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }

 private:
  std::map<std::string, size_t> places_;
  std::vector<std::pair<std::string, Value>> items_;
};

using NameSet = Ordered<char>;

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

namespace {

constexpr char kTraining[] = "__et_training_";
constexpr size_t kMostListed = 20;

std::string listed(const NameSet& names) {
  Names views;
  for (const auto& item : names) {
    views.push_back(item.first);
  }
  return quoted(views, kMostListed);
}

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

} // namespace

/// The weights of a program that is loaded on a cache, and where each is.
class LoadedWeights {
 public:
  /// @param path for messages. @param parts null if ExecuTorch's own runtime loaded the program and its file is not
  ///   known. @param cache that it takes tensors from, with the index of its records.
  /// @param follows whether the program's external tensor of a key changes with the cache.
  /// @param own if the file is not known, the keys of the blobs that the program's delegates take, from any source.
  LoadedWeights(
      std::string path,
      const ProgramParts* parts,
      const BlobCache& cache,
      const Index& index,
      std::function<bool(const std::string&)> follows,
      const std::vector<std::string>& own)
      : path_(std::move(path)), parts_(parts), cache_(cache), index_(index), follows_(std::move(follows)) {
    find_delegates(own);
    find_externals();
    find_nameless();
    for (const auto& [key, method] : externals_) {
      for (const std::string_view name : names_of(key)) {
        in_data_files_.insert(name);
      }
    }
    for (const Tensor* tensor : index_.tensors()) {
      const auto& records = tensor->made_into;
      if (std::any_of(records.begin(), records.end(), [&](const Record* record) {
            return own_.contains(record->key) && cache_.find(record->key) != nullptr;
          })) {
        for (const std::string_view name : tensor->names) {
          in_delegates_.insert(name);
        }
      }
    }
  }

  /// Whether the program trains copies of its own.
  bool trains() const {
    return parts_ != nullptr &&
        std::any_of(parts_->methods.begin(), parts_->methods.end(), [](const std::string& name) {
             return name.rfind(kTraining, 0) == 0;
           });
  }

  void out_of_reach(const Shapes& shapes, bool whole, std::vector<std::string>& problems) const {
    if (!whole && trains()) {
      return;
    }
    std::set<std::string_view> names;
    for (const Shaped& one : shapes) {
      names.insert(one.name);
    }
    find_stale(names, problems);
    find_embedded(names, whole, problems);
    find_packed_elsewhere(shapes, whole, problems);
    find_constants(shapes, whole, problems);
  }

  /// Weights that ExecuTorch's own runtime reads from memory that does not change with the cache.
  void find_stale(const std::set<std::string_view>& given, std::vector<std::string>& problems) const {
    Ordered<NameSet> found;
    for (const auto& [key, method] : externals_) {
      if (!follows_(key) && is_given(key, given)) {
        found[method][key];
      }
    }
    for (const auto& [method, keys] : found) {
      problems.push_back(format(
          "{}, which ExecuTorch's own runtime has loaded{}, {} {} from a map or a copy of its own: serve a shared "
          "working copy (make_working_copy) and give its path as data_path; a Module also needs LoadMode::Mmap",
          of(method),
          parts_ == nullptr ? " into memory" : "",
          parts_ == nullptr ? "may read" : "reads",
          listed(keys)));
    }
  }

  /// Which of the given tensors the program takes from the cache, and which from elsewhere.
  void sort(
      const std::set<std::string_view>& given,
      std::set<std::string_view>& followed,
      std::set<std::string_view>& stale) const {
    for (const std::string_view name : given) {
      if (in_delegates_.count(name) != 0 || own_.contains(std::string(name))) {
        followed.insert(name);
      }
    }
    for (const auto& external : externals_) {
      std::set<std::string_view>& found = follows_(external.first) ? followed : stale;
      for (const std::string_view name : names_of(external.first)) {
        if (const auto at = given.find(name); at != given.end()) {
          found.insert(*at);
        }
      }
    }
  }

  /// The names of the program's tensors, also of those that cannot be changed.
  void add_names(NamesInUse& names) const {
    for (const TextSet* some : {&in_data_files_, &in_delegates_}) {
      for (const std::string_view name : *some) {
        names.emplace(name);
      }
    }
    for (const std::unique_ptr<Records>& delegate : index_.delegates()) {
      if (is_of_this_program(*delegate)) {
        for (const Record& record : delegate->records) {
          add_sources(record.sources, names);
        }
        add_sources(delegate->outside, names);
      }
    }
  }

 private:
  static void add_sources(const std::vector<SourceTensor>& sources, NamesInUse& names) {
    for (const SourceTensor& source : sources) {
      names.emplace(std::string_view(source.name));
    }
  }

  /// Programs do not say which records are theirs: those of blobs that they take or, if the records are of no blob, of
  /// tensors. Records that have neither may be of any program.
  bool is_of_this_program(const Records& delegate) const {
    bool has_blobs = false;
    for (const Record& record : delegate.records) {
      has_blobs = has_blobs || record.refusal.empty();
      if (record.refusal.empty() && own_.contains(record.key)) {
        return true;
      }
    }
    bool used = delegate.outside.empty();
    for (const SourceTensor& source : delegate.outside) {
      used = used || in_data_files_.count(source.name) != 0;
    }
    return used && !has_blobs;
  }

  /// Whether a blob is made for delegates of a part of a graph, rather than a tensor under its own name.
  bool is_made(const std::string& key) const {
    constexpr size_t kDigits = 16; // behind the name, see blobstore/lowering/origins.py
    const size_t at = key.rfind('@');
    return own_.contains(key) || is_content_key(key) ||
        (at != std::string::npos && key.size() - at - 1 == kDigits &&
         key.find_first_not_of("0123456789abcdef", at + 1) == std::string::npos);
  }

  /// The keys of the tensors that the program itself takes from data files, each with a method that takes it.
  void find_externals() {
    if (parts_ == nullptr) { // then it may take any of them
      for (const Tensor* tensor : index_.tensors()) {
        for (const std::string_view name : tensor->own_keys) {
          externals_[std::string(name)];
        }
      }
      for (size_t i = 0; i < cache_.size(); ++i) { // no record tells of a method without delegates
        const Blob& blob = cache_.blob(i);
        if (blob.layout && blob.key.rfind(kKeyPrefix, 0) != 0 && !is_made(blob.key)) {
          externals_[blob.key];
        }
      }
      return;
    }
    for (const ProgramParts::External& tensor : parts_->externals) {
      if (cache_.find(tensor.key) != nullptr) {
        externals_[tensor.key] = tensor.method;
      }
    }
  }

  /// The keys that delegates of blobstore take, each with a method; and the delegates of other backends.
  void find_delegates(const std::vector<std::string>& own) {
    if (parts_ == nullptr) {
      for (const std::string& key : own) {
        own_[key];
      }
      return;
    }
    for (const ProgramParts::Delegate& delegate : parts_->delegates) {
      if (delegate.backend == kBackendId) {
        try {
          for (const DelegateConstant& constant :
               read_delegate_payload(delegate.payload.data, delegate.payload.size).constants) {
            own_[constant.key] = delegate.method;
          }
        } catch (const FormatError& error) {
          throw_error_in(ErrorKind::InvalidFile, path_, "not the payload of a BlobStoreBackend: {}", error.what());
        }
      } else if (Foreign other = foreign_of(*parts_, delegate); other.count != 0) {
        foreign_.push_back(std::move(other));
      }
    }
    for (const auto& [key, blob] : parts_->named_data) {
      if (is_records(key, blob.data, blob.size)) {
        for (const Record& record : parse_records(blob.data, blob.size, path_).records) {
          std::vector<std::string>& names = names_of_embedded_[record.key];
          names.clear();
          for (const SourceTensor& source : record.sources) {
            names.push_back(source.name);
          }
        }
      }
    }
  }

  void find_nameless() {
    if (parts_ == nullptr) {
      return;
    }
    std::set<std::pair<uint32_t, std::pair<std::string, Shape>>> seen; // external tensors have the number 0
    for (const ProgramParts::Constant& constant : parts_->constants) {
      Nameless one{constant.method, shape_of(constant.layout), true};
      if (seen.insert({constant.number, {one.method, one.shape}}).second) {
        nameless_.push_back(std::move(one));
      }
    }
    for (const ProgramParts::External& tensor : parts_->externals) {
      if (is_content_key(tensor.key) && tensor.layout && !tensor.is_mutable) {
        Nameless one{tensor.method, shape_of(*tensor.layout), false};
        if (seen.insert({0, {one.method, one.shape}}).second) {
          nameless_.push_back(std::move(one));
        }
      }
    }
  }

  Names names_of(const std::string& key) const {
    Names names{key};
    if (const Tensor* tensor = index_.find(key)) {
      names.insert(names.end(), tensor->names.begin(), tensor->names.end());
    }
    return names;
  }

  bool is_given(const std::string& key, const std::set<std::string_view>& given) const {
    const Names names = names_of(key);
    return std::any_of(names.begin(), names.end(), [&](std::string_view name) { return given.count(name) != 0; });
  }

  /// Weights of blobstore's delegates that the program contains.
  void find_embedded(const std::set<std::string_view>& given, bool whole, std::vector<std::string>& problems) const {
    Ordered<NameSet> found;
    for (const auto& [key, method] : own_) {
      const size_t at = key.rfind('@');
      if (at == std::string::npos || cache_.find(key) != nullptr) {
        continue;
      }
      const auto known = names_of_embedded_.find(key);
      for (const std::string& name :
           known == names_of_embedded_.end() ? std::vector<std::string>{key.substr(0, at)} : known->second) {
        if (whole || given.count(name) != 0) {
          found[method][name];
        }
      }
    }
    for (const auto& [method, inside] : found) {
      problems.push_back(format("{} has {} inside: pass a tag to BlobStorePartitioner", of(method), listed(inside)));
    }
  }

  /// Weights that delegates of other backends packed.
  void find_packed_elsewhere(const Shapes& shapes, bool whole, std::vector<std::string>& problems) const {
    std::set<uint64_t> nbytes;
    for (const Shaped& one : shapes) {
      if (one.scalar_type >= 0 && in_data_files_.count(one.name) == 0 && in_delegates_.count(one.name) == 0) {
        nbytes.insert(item_size(one.scalar_type) * elements({one.scalar_type, one.sizes}));
      }
    }
    std::vector<std::pair<const Foreign*, std::optional<size_t>>> found; // by method and backend, with their constants
    for (const Foreign& one : foreign_) {
      const bool fits =
          std::any_of(one.sizes.begin(), one.sizes.end(), [&](uint64_t size) { return nbytes.count(size) != 0; });
      if (!whole && !fits && (nbytes.empty() || !one.sizes.empty())) {
        continue;
      }
      const auto same = std::find_if(found.begin(), found.end(), [&](const auto& other) {
        return other.first->method == one.method && other.first->backend == one.backend;
      });
      if (same == found.end()) {
        found.emplace_back(&one, one.count);
      } else {
        same->second = same->second && one.count ? std::optional(*same->second + *one.count) : std::nullopt;
      }
    }
    for (const auto& [one, count] : found) {
      problems.push_back(format(
          "{} has {} that {} packed: lower it with BlobStorePartitioner",
          of(one->method),
          count ? format("{} constants", *count) : "weights",
          one->backend));
    }
  }

  /// Weights without names, recognized by dtype and shape unless their tensor is known to be in another place.
  void find_constants(const Shapes& shapes, bool whole, std::vector<std::string>& problems) const {
    const bool delegated = !own_.empty();
    const bool knows_names = delegated ||
        std::any_of(externals_.begin(), externals_.end(), [](const auto& one) { return !is_content_key(one.first); });
    std::map<Shape, std::vector<std::string>> by_shape;
    for (const Shaped& one : shapes) {
      const std::string name(one.name);
      const bool elsewhere = in_data_files_.count(name) != 0 || (delegated && index_.find(name) == nullptr);
      // a matrix may be both in a delegate and in an embedding; for vectors, equal lengths prove nothing
      if (one.scalar_type >= 0 && !elsewhere && (one.sizes.size() > 1 || in_delegates_.count(name) == 0)) {
        by_shape[{one.scalar_type, one.sizes}].push_back(name);
      }
    }
    struct Found {
      bool is_inside = false;
      NameSet names;
      size_t count = 0;
    };
    std::vector<std::pair<std::string, Found>> named;
    std::vector<std::pair<std::string, Found>> unnamed;
    const auto at = [](auto& list, const Nameless& one) -> Found& {
      for (auto& [method, found] : list) {
        if (method == one.method && found.is_inside == one.is_inside) {
          return found;
        }
      }
      list.emplace_back(one.method, Found{one.is_inside, {}, 0});
      return list.back().second;
    };
    for (const Nameless& one : nameless_) {
      const auto known = by_shape.find(one.shape);
      if (known != by_shape.end() && may_be_weight(one.shape, true)) {
        Found& found = at(named, one);
        for (const std::string& name : known->second) {
          found.names[name];
        }
      } else if (whole && !knows_names && may_be_weight(one.shape, false)) {
        ++at(unnamed, one).count;
      }
    }
    for (const auto& [method, found] : named) {
      problems.push_back(
          format("{} has constants like {} {}", of(method), listed(found.names), place_of(found.is_inside)));
    }
    for (const auto& [method, found] : unnamed) {
      problems.push_back(
          format("{} has {} constants without names {}", of(method), found.count, place_of(found.is_inside)));
    }
  }

  std::string of(const std::string& method) const {
    return method.empty() ? path_ : format("method '{}' of {}", method, path_);
  }

  std::string path_;
  const ProgramParts* parts_;
  const BlobCache& cache_;
  const Index& index_;
  std::function<bool(const std::string&)> follows_;
  Ordered<std::string> externals_;
  Ordered<std::string> own_;
  std::vector<Foreign> foreign_;
  std::map<std::string, std::vector<std::string>> names_of_embedded_;
  std::vector<Nameless> nameless_;
  TextSet in_data_files_; // names of the tensors that it takes from there without a delegate
  TextSet in_delegates_; // ... and that its delegates take, through the cache
};

namespace {

/// A program that ExecuTorch has mapped; null if its path no longer leads to the same file.
std::shared_ptr<const ProgramParts> open_served(const std::string& path, uint64_t inode) {
  try {
    if (path.empty()) {
      return nullptr;
    }
    const File file(path, false);
    if (file.status().inode != inode) {
      return nullptr;
    }
    const uint64_t size = file.size();
    const auto map = std::make_shared<Mapping>(file, 0, size, Mapping::Kind::ReadOnly);
    auto parts = std::make_shared<ProgramParts>(read_program_parts(path, map->data(), size));
    parts->owner = map;
    return parts;
  } catch (const Error&) {
    return nullptr;
  }
}

/// Whether a key belongs to a shared working copy that one of the caches with these ids has mapped.
bool is_shared_in(const BlobCache& cache, const std::set<uint64_t>& ids, const std::string& key) {
  const BlobCache* owner = &cache;
  while (owner != nullptr && !owner->owns(key)) {
    owner = owner->base().get();
  }
  return owner != nullptr && owner->mode() == BlobCache::Mode::Shared && ids.count(owner->id()) != 0;
}

std::vector<std::string> each_once(std::vector<std::string> problems) {
  std::vector<std::string> found;
  for (std::string& problem : problems) {
    if (std::find(found.begin(), found.end(), problem) == found.end()) {
      found.push_back(std::move(problem));
    }
  }
  return found;
}

/// The delegates of one method of one program that ExecuTorch's own runtime has loaded.
struct ServedMethod {
  std::vector<std::string> keys;
  std::set<uint64_t> same;
  std::set<uint64_t> other;
};

} // namespace

void Reach::for_each(
    const BlobCache& cache, const Index& index, const std::function<void(const LoadedWeights& weights)>& visit) {
  for (const std::shared_ptr<const LoadedProgram>& program : programs_on(cache)) {
    const std::shared_ptr<BlobCache>& own = program->cache();
    const std::shared_ptr<const Index> above = own.get() == &cache ? nullptr : index_of(own);
    visit(LoadedWeights(
        program->path(), &program->parts(), *own, above ? *above : index, [](const std::string&) { return true; }, {}));
  }
  std::map<std::tuple<std::string, std::string, uint64_t>, size_t> places;
  std::vector<std::pair<ServedDelegate, ServedMethod>> methods;
  for (const ServedDelegate& one : served_delegates(cache)) {
    const auto [at, is_new] = places.emplace(std::tuple(one.method, one.program, one.inode), methods.size());
    if (is_new) {
      methods.emplace_back(one, ServedMethod());
    }
    ServedMethod& method = methods[at->second].second;
    method.keys.insert(method.keys.end(), one.keys.begin(), one.keys.end());
    method.keys.insert(method.keys.end(), one.others.begin(), one.others.end());
    method.same.insert(one.same_files.begin(), one.same_files.end());
    method.other.insert(one.other_files.begin(), one.other_files.end());
  }
  Files files;
  for (auto& [about, method] : methods) {
    const std::shared_ptr<const ProgramParts>& parts = files[{about.program, about.inode}] =
        served(about.program, about.inode);
    for (const uint64_t id : method.other) {
      method.same.erase(id);
    }
    visit(LoadedWeights(
        parts == nullptr ? format("a program with a method '{}'", about.method) : parts->path,
        parts.get(),
        cache,
        index,
        [&, &same = method.same](const std::string& key) { return is_shared_in(cache, same, key); },
        method.keys));
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  served_ = std::move(files); // drops the programs that are gone
}

std::vector<std::string> Reach::out_of_reach(
    const BlobCache& cache, const Index& index, const std::vector<Shaped>& tensors, bool whole) {
  std::vector<std::string> problems;
  for_each(cache, index, [&](const LoadedWeights& weights) { weights.out_of_reach(tensors, whole, problems); });
  return each_once(std::move(problems));
}

std::optional<NamesInUse> Reach::in_use(const BlobCache& cache, const Index& index, bool serving) {
  std::optional<NamesInUse> names;
  for_each(cache, index, [&](const LoadedWeights& weights) {
    if (serving && weights.trains()) {
      return;
    }
    if (!names) {
      names.emplace();
    }
    weights.add_names(*names);
  });
  return names;
}

std::set<std::string_view> Reach::without_effect(
    const BlobCache& cache,
    const Index& index,
    const std::vector<std::string_view>& names,
    std::vector<std::string>& problems) {
  const uint64_t programs = served_changes() + program_changes(); // first, so that a later one is noticed next time
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (programs == programs_ &&
        std::all_of(names.begin(), names.end(), [&](std::string_view name) { return with_effect_.count(name) != 0; })) {
      return {};
    }
  }
  if (served_delegates(cache).empty()) {
    return {};
  }
  const std::set<std::string_view> given(names.begin(), names.end());
  std::set<std::string_view> followed;
  std::set<std::string_view> stale;
  for_each(cache, index, [&](const LoadedWeights& weights) { weights.sort(given, followed, stale); });
  for (const std::string_view name : followed) {
    stale.erase(name);
  }
  if (!stale.empty()) {
    for_each(cache, index, [&](const LoadedWeights& weights) { weights.find_stale(stale, problems); });
    problems = each_once(std::move(problems));
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  if (programs != programs_) {
    with_effect_.clear();
    programs_ = programs;
  }
  for (const std::string_view name : names) {
    if (stale.count(name) == 0 && (index.find(name) != nullptr || cache.owns(name))) {
      with_effect_.emplace(name);
    }
  }
  return stale;
}

std::shared_ptr<const ProgramParts> Reach::served(const std::string& path, uint64_t inode) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto known = served_.find({path, inode});
    if (known != served_.end() && known->second != nullptr) {
      return known->second;
    }
  }
  return open_served(path, inode);
}

std::shared_ptr<const Index> Reach::index_of(const std::shared_ptr<BlobCache>& cache) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto at = above_.begin(); at != above_.end();) {
      at = at->second->cache.expired() ? above_.erase(at) : std::next(at);
    }
    if (const auto known = above_.find(cache->id()); known != above_.end()) {
      return {known->second, &known->second->index};
    }
  }
  const auto made = std::make_shared<const Above>(cache); // without the lock, because it takes those of the cache
  const std::lock_guard<std::mutex> guard(mutex_);
  above_[cache->id()] = made;
  return {made, &made->index};
}

} // namespace blobstore::internal
