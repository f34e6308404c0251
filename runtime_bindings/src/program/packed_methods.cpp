// How a program loads its methods with packed weights, and packs them if no file has them.

#include <optional>
#include <set>
#include <utility>
#include <vector>

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

/// What the file for XNNPACK's own delegates gets beside the bytes that were packed to `scratch`.
class StockMade {
 public:
  StockMade(const CacheDataMap& blobs, const ScratchFile& scratch, const LoadPlan& building, StockMaps::Load load)
      : scratch_(scratch), building_(building), load_(load), maps_(blobs, scratch, building, std::move(load)) {}

  /// Add a method that was packed.
  void add(size_t method, bool changes) {
    if (!changes) {
      again_.merge(packed_again(scratch_, [&] { load_(method, building_); }));
    }
    (!changes || maps_.learn(method) ? in_file_ : on_heap_).push_back(method);
  }

  PackedMade made(const PackedPurpose& purpose, const std::vector<std::string>& methods) {
    PackedMade made;
    made.wanted = [this](std::string_view name) { return again_.count(std::string(name)) == 0; };
    for (const size_t method : in_file_) {
      made.covers.insert(maps_.ambiguous() ? heap_id_of(purpose, methods[method]) : id_of(purpose, methods[method]));
    }
    for (const size_t method : on_heap_) {
      made.covers.insert(heap_id_of(purpose, methods[method]));
    }
    made.maps = std::move(maps_.maps);
    made.keys = std::move(maps_.keys);
    return made;
  }

 private:
  const ScratchFile& scratch_;
  const LoadPlan& building_;
  const StockMaps::Load load_;
  StockMaps maps_;
  std::vector<size_t> in_file_;
  std::vector<size_t> on_heap_; // methods whose weights would not follow the working copy
  std::set<std::string> again_; // entries that a file cannot have
};

} // namespace

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

const Digest& LoadedProgram::file_digest() const {
  std::call_once(hashed_, [&] {
    const auto [data, size] = file();
    digest_ = digest(data, size);
  });
  return digest_;
}

/// What the packed weights of a method are for, and why those that are for nothing have no file.
LoadPlan LoadedProgram::plan_load(size_t method) const {
  LoadPlan plan;
  plan.store = packed_;
  const std::optional<Digest> runtime = packing_runtime();
  if (!runtime) {
    plan.own.fallback = plan.stock.fallback = "this system does not tell builds of XNNPACK apart";
    return plan;
  }
  const bool one_way = !uses(method, kXnnpack) || packs_in_one_way();
  const BlobCache::Reading reading(*cache_);
  plan.generation = cache_->generation();
  if (const auto foundation = foundation_of(*cache_)) {
    plan.own.purpose = PackedPurpose{*foundation, *runtime, lowest(*cache_).mode() == BlobCache::Mode::Shared};
  } else {
    plan.own.fallback = kChangedBefore;
  }
  if (!one_way) {
    plan.stock.fallback = kPackedInTwoWays;
  } else if (uses(method, kXnnpack)) {
    plan_stock(plan.stock, *runtime);
  }
  return plan;
}

void LoadedProgram::plan_stock(Packing& stock, const Digest& runtime) const {
  const bool changes = lowest(*cache_).mode() == BlobCache::Mode::Shared;
  if (changes && cache_->base() != nullptr) {
    stock.fallback = kNotInCopies; // such as those of an adapter
    return;
  }
  const std::optional<Digest> contents = changes ? foundation_of(*cache_) : contents_of(*cache_);
  if (contents && (changes || !any_changed(*cache_))) {
    stock.purpose = PackedPurpose{*contents, runtime, changes, file_digest()};
  } else {
    stock.fallback = kChangedBefore;
  }
}

/// Find the file that has the packed weights of a method, as far as the file can say.
LoadedProgram::Found LoadedProgram::look_up(size_t method, Packing& packing) const {
  if (!packing.purpose) {
    return Found::OnHeap;
  }
  packing.file = packed_->find(*packing.purpose);
  if (!packing.purpose->program) { // it covers delegates, not methods
    return packing.file == nullptr && uses(method, packing.backend) ? Found::Missing : Found::InFile;
  }
  if (packing.file == nullptr) {
    return Found::Missing;
  }
  const std::string& name = methods()[method];
  Found found = packing.file->covers(heap_id_of(*packing.purpose, name)) ? Found::OnHeap : Found::Missing;
  if (packing.file->covers(id_of(*packing.purpose, name))) {
    found = Found::InFile;
    if (packing.purpose->changes) {
      packing.copy = packed_->copy_of(mapped(*cache_), packing.file);
      found = packing.copy != nullptr ? Found::InFile : Found::OnHeap;
    }
  }
  if (packing.purpose->changes && found != Found::InFile) { // it would have the weights of one moment
    packing.file = nullptr;
  }
  return found;
}

/// Load a method on the files that are there.
/// @param whole whether to return nullptr if some of its weights are in none.
std::shared_ptr<Method> LoadedProgram::load_on_files(size_t method, LoadPlan plan, bool whole) {
  plan.must_cover = whole && plan.own.purpose;
  if (look_up(method, plan.own) == Found::Missing && whole) {
    return nullptr;
  }
  const Found stock = look_up(method, plan.stock);
  if (whole && stock == Found::Missing) {
    return nullptr;
  }
  std::optional<HeapGrowth> growth;
  if (uses(method, kXnnpack) && stock != Found::InFile) {
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
  if (plan.own.file != nullptr) {
    read_ahead(plan.own.file->file(), result.used, most);
  }
  if (stock == Found::InFile) {
    read_ahead(plan.stock.file->file(), {{0, plan.stock.file->size()}}, most);
  }
  if (stock == Found::InFile && plan.stock.file->entries() == 0) { // not even the load that it was made by wrote any
    packed_->note_unmapped();
  } else if (growth) {
    packed_->note_fallback(plan.stock.fallback.empty() ? kNotInCopies : plan.stock.fallback, growth->bytes());
  } else if (uses(method, kXnnpack)) {
    packed_->note_hit();
  }
  return loaded;
}

std::shared_ptr<Method> LoadedProgram::load_packed(size_t method) {
  LoadPlan plan = plan_load(method);
  std::shared_ptr<Method> loaded = load_or_build(method, plan);
  const std::optional<PackedPurpose>& stock = plan.stock.purpose;
  if (stock && !stock->changes && cache_->generation() != plan.generation) {
    loaded.reset(); // it may have packed weights of before, as the names of their entries do not tell contents
    plan.stock = {kXnnpack, std::nullopt, kChangedMeanwhile};
    loaded = load_on_files(method, plan, /*whole=*/false);
  }
  return loaded;
}

std::shared_ptr<Method> LoadedProgram::load_or_build(size_t method, LoadPlan& plan) {
  if (std::shared_ptr<Method> loaded = load_on_files(method, plan, /*whole=*/true)) {
    return loaded;
  }
  cache_->verify(); // entries are named by the digests that data files record, and packed from the bytes that they have
  try {
    const PackedFolder::Building building = packed_->begin_build();
    plan = plan_load(method); // waiting may have taken a while
    if (std::shared_ptr<Method> loaded = load_on_files(method, plan, /*whole=*/true)) {
      return loaded; // another process has built it meanwhile
    }
    pack_all(plan);
  } catch (const Error& error) {
    plan.own.fallback = plan.stock.fallback = "no file could be written: " + error.reason();
  }
  return load_on_files(method, plan, /*whole=*/false);
}

std::string LoadedProgram::packed_cache_path() const {
  for (size_t i = 0; kPackedStores && packed_ != nullptr && i < methods().size(); ++i) {
    if (uses(i, kXnnpack)) {
      Packing stock = plan_load(i).stock;
      if (look_up(i, stock) == Found::InFile) {
        return stock.file->path();
      }
    }
  }
  return {};
}

/// Pack the weights of all methods into memory, and write them to files.
void LoadedProgram::pack_all(LoadPlan& plan) {
  const ScratchFile own = packed_->scratch();
  const ScratchFile stock = packed_->scratch();
  LoadPlan building;
  building.store = packed_;
  building.own.scratch = &own;
  building.stock.scratch = plan.stock.purpose ? &stock : nullptr;
  LoadResult result;
  const auto load = [&](size_t method, const LoadPlan& with) { return make_method(method, State::Own, with, result); };
  StockMade stock_made(map_, stock, building, load);
  std::vector<std::shared_ptr<Method>> together; // ExecuTorch packs into a file only while something uses it
  for (size_t i = 0; i < methods().size(); ++i) {
    if (!uses(i, kBackendId) && !uses(i, kXnnpack)) {
      continue;
    }
    try {
      check_backends(i);
      together.push_back(load(i, building));
      if (plan.stock.purpose && uses(i, kXnnpack)) {
        stock_made.add(i, plan.stock.purpose->changes);
      }
    } catch (const Error&) { // a method that cannot be loaded here has nothing to pack
    }
  }
  const auto write = [&](const Packing& packing, const ScratchFile& scratch, PackedMade made) {
    if (!made.covers.empty()) {
      packed_->add(*packing.purpose, scratch, std::move(made));
    }
  };
  if (plan.own.purpose) {
    write(plan.own, own, result.made());
  }
  if (plan.stock.purpose && cache_->generation() != plan.generation) {
    plan.stock.fallback = kChangedMeanwhile; // the contents of the entries are unknown; the next load packs them
  } else if (plan.stock.purpose) {
    write(plan.stock, stock, stock_made.made(*plan.stock.purpose, methods()));
  }
}

} // namespace blobstore::internal
