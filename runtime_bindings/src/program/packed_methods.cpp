// How a program loads its methods with packed weights, and packs them if no file has them.

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <blobstore/delegate.h>
#include <blobstore/reading.h>

#include "cache/mapped_cache.h"
#include "packed/load_plan.h"
#include "packed/stock_graph.h"
#include "packed/stock_maps.h"
#include "program/loaded_program.h"

namespace blobstore::internal {
namespace {

constexpr char kChangedMeanwhile[] = "weights changed while they were packed";
constexpr char kPackedInTwoWays[] = "operators pack one weight in different ways, under one name";

/// What a file of ExecuTorch's own delegates says of a method. It also says whose weights they are, because entries do
/// not, and files can be renamed.
Digest id_of(const PackedPurpose& purpose, const std::string& method) {
  const std::string text =
      to_string(purpose.foundation) + to_string(purpose.runtime) + to_string(*purpose.program) + method;
  return digest(text.data(), text.size());
}

/// In place of that, if the weights of the method do not follow a working copy.
Digest heap_id_of(const PackedPurpose& purpose, const std::string& method) {
  return id_of(purpose, method + '\0' + "heap");
}

bool any_changed(const BlobCache& cache) {
  for (size_t i = 0; i < cache.size(); ++i) {
    if (cache.differs_from_file(cache.blob(i).key)) {
      return true;
    }
  }
  return false;
}

} // namespace

/// What the weights of this program are packed for, as far as it is known.
struct LoadedProgram::PackedUse {
  std::optional<PackedPurpose> own; // of blobstore's delegates
  std::optional<PackedPurpose> stock; // of XNNPACK's own, whose names do not tell all contents: for this program only
  std::string fallback; // why it has no file
  uint64_t generation = 0; // that of the cache then
};

/// Whether the names that XNNPACK's own delegates pack weights under, which cannot be changed, tell them apart.
bool LoadedProgram::packs_in_one_way() const {
  std::call_once(ways_read_, [&] {
    PackedWays ways;
    for (const ProgramParts::Delegate& delegate : parts().delegates) {
      if (delegate.backend == kXnnpack) {
        try {
          one_way_ = note_packed_ways(delegate.payload.data, delegate.payload.size, ways) && one_way_;
        } catch (const FormatError&) { // XNNPACK says what is wrong with it
          one_way_ = false;
        }
      }
    }
  });
  return one_way_;
}

LoadedProgram::PackedUse LoadedProgram::packed_use(size_t method) const {
  PackedUse use;
  const std::optional<Digest> runtime = packing_runtime();
  if (!runtime) {
    use.fallback = "this system does not tell builds of XNNPACK apart";
    return use;
  }
  const bool takes_stock = uses(method, kXnnpack) && packs_in_one_way();
  const BlobCache::Reading reading(*cache_);
  use.generation = cache_->generation();
  if (const auto foundation = foundation_of(*cache_)) {
    use.own = PackedPurpose{*foundation, *runtime, lowest(*cache_).mode() == BlobCache::Mode::Shared};
  } else {
    use.fallback = kChangedBefore;
  }
  if (!takes_stock) {
    if (uses(method, kXnnpack)) {
      use.fallback = kPackedInTwoWays;
    }
    return use;
  }
  const bool changes = lowest(*cache_).mode() == BlobCache::Mode::Shared;
  if (changes && cache_->base() != nullptr) {
    use.fallback = kNotInCopies; // such as those of an adapter
  } else if (const auto contents = changes ? foundation_of(*cache_) : contents_of(*cache_);
             contents && (changes || !any_changed(*cache_))) {
    std::call_once(hashed_, [&] {
      const auto [data, size] = file();
      digest_ = digest(data, size);
    });
    use.stock = PackedPurpose{*contents, *runtime, changes, digest_};
  } else {
    use.fallback = kChangedBefore;
  }
  return use;
}

/// Load a method on the files that are there.
/// @param whole whether to return nullptr if some of its weights are in none.
std::shared_ptr<Method> LoadedProgram::load_on_files(size_t method, const PackedUse& use, bool whole) {
  LoadPlan plan;
  plan.store = packed_;
  plan.file = use.own ? packed_->find(*use.own) : nullptr;
  plan.stock_file = use.stock ? packed_->find(*use.stock) : nullptr;
  plan.must_cover = whole && use.own.has_value();
  plan.fallback = use.fallback;
  const bool has_stock = uses(method, kXnnpack);
  const auto covers = [&](const Digest& id) { return plan.stock_file->covers(id); };
  bool stock_covered = plan.stock_file != nullptr && covers(id_of(*use.stock, methods()[method]));
  const bool to_heap = plan.stock_file != nullptr && covers(heap_id_of(*use.stock, methods()[method]));
  const bool own_missing = use.own && plan.file == nullptr && uses(method, kBackendId);
  if (whole && (own_missing || (use.stock && !stock_covered && !to_heap))) {
    return nullptr;
  }
  if (stock_covered && use.stock->changes) {
    plan.stock_copy = packed_->copy_of(mapped(*cache_), plan.stock_file);
    stock_covered = plan.stock_copy != nullptr;
  }
  if (use.stock && use.stock->changes && !stock_covered) { // it would have the weights of one moment
    plan.stock_file = nullptr;
  }
  std::optional<HeapGrowth> growth;
  if (has_stock && !stock_covered) {
    growth.emplace();
  }
  LoadResult result;
  std::shared_ptr<Method> loaded;
  try {
    loaded = make_method(method, State::Shared, plan, result);
  } catch (const Error&) {
    if (result.refused) {
      return nullptr;
    }
    throw;
  }
  // after the load, so that what it reads itself does not wait behind this
  const uint64_t most = packed_->options().read_ahead;
  if (plan.file != nullptr) {
    read_ahead(plan.file->file(), result.used, most);
  }
  if (stock_covered) {
    read_ahead(plan.stock_file->file(), {{0, plan.stock_file->size()}}, most);
  }
  if (growth) {
    packed_->note_fallback(use.fallback.empty() ? kNotInCopies : use.fallback, growth->bytes());
  } else if (has_stock) {
    packed_->note_hit();
  }
  return loaded;
}

std::shared_ptr<Method> LoadedProgram::load_packed(size_t method) {
  PackedUse use = packed_use(method);
  std::shared_ptr<Method> loaded = load_or_build(method, use);
  if (use.stock && !use.stock->changes && cache_->generation() != use.generation) {
    loaded.reset(); // it may have packed weights of before, as the names of their entries do not tell contents
    use.stock.reset();
    use.fallback = kChangedMeanwhile;
    loaded = load_on_files(method, use, /*whole=*/false);
  }
  return loaded;
}

std::shared_ptr<Method> LoadedProgram::load_or_build(size_t method, PackedUse& use) {
  if (std::shared_ptr<Method> loaded = load_on_files(method, use, /*whole=*/true)) {
    return loaded;
  }
  cache_->verify(); // entries are named by the digests that data files record, and packed from the bytes that they have
  try {
    const PackedFolder::Building building = packed_->begin_build();
    use = packed_use(method); // waiting may have taken a while
    if (std::shared_ptr<Method> loaded = load_on_files(method, use, /*whole=*/true)) {
      return loaded; // another process has built it meanwhile
    }
    pack_all(use);
  } catch (const Error& error) {
    use.fallback = "no file could be written: " + error.reason();
  }
  return load_on_files(method, use, /*whole=*/false);
}

std::string LoadedProgram::packed_cache_path() const {
  for (size_t i = 0; packed_ != nullptr && i < methods().size(); ++i) {
    if (uses(i, kXnnpack)) {
      const PackedUse use = packed_use(i);
      const auto file = use.stock ? packed_->find(*use.stock) : nullptr;
      if (file != nullptr && file->covers(id_of(*use.stock, methods()[i])) &&
          (!use.stock->changes || packed_->copy_of(mapped(*cache_), file) != nullptr)) {
        return file->path();
      }
    }
  }
  return {};
}

/// Pack the weights of all methods into memory, and write them to files.
void LoadedProgram::pack_all(PackedUse& use) {
  const ScratchFile own = packed_->scratch();
  const ScratchFile stock = packed_->scratch();
  LoadPlan plan;
  plan.store = packed_;
  plan.scratch = &own;
  plan.stock_scratch = use.stock ? &stock : nullptr;
  LoadResult result;
  const auto load = [&](size_t method, const LoadPlan& with) { return make_method(method, State::Own, with, result); };
  std::vector<size_t> in_file; // methods
  std::vector<size_t> on_heap; // those whose weights would not follow the working copy
  std::set<std::string> again; // entries that a file cannot have
  StockMaps maps(map_, stock, plan, load);
  std::vector<std::shared_ptr<Method>> together; // ExecuTorch packs into a file only while something uses it
  for (size_t i = 0; i < methods().size(); ++i) {
    if (!uses(i, kBackendId) && !uses(i, kXnnpack)) {
      continue;
    }
    try {
      check_backends(i);
      together.push_back(load(i, plan));
      if (use.stock && uses(i, kXnnpack)) {
        const bool follows = !use.stock->changes || maps.learn(i);
        if (!use.stock->changes) {
          again.merge(packed_again(stock, [&] { load(i, plan); }));
        }
        (follows ? in_file : on_heap).push_back(i);
      }
    } catch (const Error&) { // a method that cannot be loaded here has nothing to pack
    }
  }
  if (use.own && !result.covers.empty()) {
    const auto wanted = [&](std::string_view name) { return result.wants(name); };
    packed_->add(*use.own, own, {wanted, std::move(result.covers), std::move(result.maps), std::move(result.keys)});
  }
  if (use.stock && cache_->generation() != use.generation) {
    use.fallback = kChangedMeanwhile; // the contents of the entries are unknown; the next load packs them
  } else if (use.stock && in_file.size() + on_heap.size() != 0) {
    const auto wanted = [&](std::string_view name) { return again.count(std::string(name)) == 0; };
    std::set<Digest> covers;
    if (maps.ambiguous()) {
      on_heap.insert(on_heap.end(), in_file.begin(), in_file.end());
      in_file.clear();
    }
    const auto cover = [&](const std::vector<size_t>& which, auto id) {
      std::transform(which.begin(), which.end(), std::inserter(covers, covers.end()), [&](size_t method) {
        return id(*use.stock, methods()[method]);
      });
    };
    cover(in_file, id_of);
    cover(on_heap, heap_id_of);
    packed_->add(*use.stock, stock, {wanted, std::move(covers), std::move(maps.maps), std::move(maps.keys)});
  }
}

} // namespace blobstore::internal
