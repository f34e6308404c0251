// How a program loads its methods with packed weights, and packs them if no file has them.

#include <optional>
#include <utility>

#include <blobstore/delegate.h>
#include <blobstore/reading.h>

#include "delegate/packing.h"
#include "program/loaded_program.h"

namespace blobstore::internal {
namespace {

Digest id_of(const std::string& method) {
  return digest(method.data(), method.size());
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
  std::string fallback; // why there is none
};

LoadedProgram::PackedUse LoadedProgram::packed_use(size_t method) const {
  PackedUse use;
  const std::optional<Digest> runtime = packing_runtime();
  if (!runtime) {
    use.fallback = "this system does not tell builds of XNNPACK apart";
    return use;
  }
  const BlobCache::Reading reading(*cache_);
  if (const auto foundation = foundation_of(*cache_)) {
    use.own = PackedPurpose{*foundation, *runtime, lowest(*cache_).mode() == BlobCache::Mode::Shared};
  } else {
    use.fallback = kChangedBefore;
  }
  if (!uses(method, kXnnpack)) {
    return use;
  }
  if (const auto contents = contents_of(*cache_); contents && !any_changed(*cache_)) {
    std::call_once(hashed_, [&] {
      const auto [data, size] = file();
      digest_ = digest(data, size);
    });
    Hasher hasher;
    hasher.update(contents->data(), contents->size());
    hasher.update(digest_.data(), digest_.size());
    use.stock = PackedPurpose{hasher.digest(), *runtime};
  } else {
    use.fallback = kChangedBefore;
  }
  return use;
}

/// Load a method on the files that are there.
/// @param whole whether to return nullptr if some of its weights are in none.
std::shared_ptr<Method> LoadedProgram::load_on_files(size_t method, const PackedUse& use, bool whole) {
  Packing packing(packed_);
  packing.file = use.own ? packed_->find(*use.own) : nullptr;
  packing.stock_file = use.stock ? packed_->find(*use.stock) : nullptr;
  packing.must_cover = whole && use.own.has_value();
  packing.fallback = use.fallback;
  const bool has_stock = uses(method, kXnnpack);
  const bool stock_covered = packing.stock_file != nullptr && packing.stock_file->covers(id_of(methods()[method]));
  const bool own_missing = use.own && packing.file == nullptr && uses(method, kBackendId);
  if (whole && (own_missing || (use.stock && !stock_covered))) {
    return nullptr;
  }
  std::optional<HeapGrowth> growth;
  if (has_stock && !stock_covered) {
    growth.emplace();
  }
  std::shared_ptr<Method> loaded;
  try {
    loaded = make_method(method);
  } catch (const Error&) {
    if (packing.refused) {
      return nullptr;
    }
    throw;
  }
  if (growth) {
    packed_->note_fallback(use.fallback, growth->bytes());
  } else if (has_stock) {
    packed_->note_hit();
  }
  return loaded;
}

std::shared_ptr<Method> LoadedProgram::load_packed(size_t method) {
  PackedUse use = packed_use(method);
  if (std::shared_ptr<Method> loaded = load_on_files(method, use, /*whole=*/true)) {
    return loaded;
  }
  try {
    const PackedFolder::Building building = packed_->begin_build();
    if (std::shared_ptr<Method> loaded = load_on_files(method, use, /*whole=*/true)) {
      return loaded; // another process has built it meanwhile
    }
    pack_all(use);
  } catch (const Error& error) {
    use.fallback = "no file could be written: " + error.reason();
  }
  return load_on_files(method, use, /*whole=*/false);
}

/// Pack the weights of all methods into memory, and write them to files.
void LoadedProgram::pack_all(const PackedUse& use) {
  const ScratchFile own = packed_->scratch();
  const ScratchFile stock = packed_->scratch();
  Packing packing(packed_);
  packing.scratch = &own;
  packing.stock_scratch = use.stock ? &stock : nullptr;
  std::set<Digest> stock_methods;
  std::vector<std::shared_ptr<Method>> together; // because ExecuTorch packs into a file only until all who use it go
  for (size_t i = 0; i < methods().size(); ++i) {
    if (!uses(i, kBackendId) && !uses(i, kXnnpack)) {
      continue;
    }
    try {
      check_backends(i);
      together.push_back(make_method(i, State::Own));
      if (uses(i, kXnnpack)) {
        stock_methods.insert(id_of(methods()[i]));
      }
    } catch (const Error&) { // a method that cannot be loaded here has nothing to pack
    }
  }
  if (use.own && !packing.covers.empty()) {
    const auto wanted = [&](std::string_view name) { return packing.wants(name); };
    packed_->add(*use.own, own, {wanted, std::move(packing.covers), std::move(packing.maps), std::move(packing.keys)});
  }
  if (use.stock && !stock_methods.empty()) {
    packed_->add(*use.stock, stock, {[](std::string_view) { return true; }, std::move(stock_methods), {}, {}});
  }
}

} // namespace blobstore::internal
