// Packed weights of quantized layers, of each kind and for the micro-kernels that this processor gets.
//
//   packed_kinds_test FOLDER [sme|dot|old]
//
// Each NAME.pte in the folder takes float[2, 64] and runs two linear layers in a delegate of XNNPACK; NAME.out has what
// torch computes. On aarch64 ExecuTorch's wheel has KleidiAI, Arm's own kernels. The second argument says which of them
// this processor gets: all, those for products of int8, or none.

#include <cmath>
#include <filesystem>

#include <blobstore/packed.h>
#include <blobstore/program.h>

#include "helpers.h"

#if defined(__aarch64__)
#include <dlfcn.h>

// The functions of KleidiAI that pack, which count here that they were called: the dynamic linker finds these before
// those in ExecuTorch's library. They change registers only that any call may change.
#define KLEIDIAI(WITH)                                    \
  WITH(kai_run_rhs_pack_kxn_f32p2vlx1biasf32_f32_f32_sme) \
  WITH(kai_run_rhs_pack_nxk_f32p2vlx1biasf32_f32_f32_sme) \
  WITH(kai_run_rhs_pack_nxk_x16p2vlx2b_x16_x16_sme)       \
  WITH(kai_run_rhs_pack_nxk_qsi8cxp_qsi8cx_neon)          \
  WITH(kai_run_rhs_pack_kxn_qsi8cxp_qsi8cx_neon)          \
  WITH(kai_run_rhs_pack_nxk_qsi4cxp_qs4cxs1s0)            \
  WITH(kai_run_rhs_pack_nxk_qsi4cxps1s0_qsu4cxs1s0_neon)  \
  WITH(kai_run_rhs_pack_nxk_qsi4c32p_qsu4c32s1s0)

#define COUNTED(name)                                                                               \
  extern "C" {                                                                                      \
  uint64_t calls_##name = 0;                                                                        \
  void* real_##name = nullptr;                                                                      \
  }                                                                                                 \
  __asm__(".text\n.globl " #name "\n.type " #name ", %function\n" #name ":\nadrp x16, calls_" #name \
          "\nadd x16, x16, :lo12:calls_" #name                                                      \
          "\nldr x17, [x16]\nadd x17, x17, #1\nstr x17, [x16]\nadrp x16, real_" #name               \
          "\nldr x16, [x16, :lo12:real_" #name "]\nbr x16\n.size " #name ", .-" #name "\n");
KLEIDIAI(COUNTED)
#undef COUNTED
#endif

namespace {

using namespace blobstore; // NOLINT: all that is tested is in there

#if defined(__aarch64__)
struct Counted {
  const char* name;
  uint64_t& calls;
  void*& real;
};
#define COUNTED(name) {#name, calls_##name, real_##name},
const std::vector<Counted> kCounted{KLEIDIAI(COUNTED)};
#undef COUNTED
#endif

/// Whether a function of KleidiAI packed since the last call. @param part of its name.
bool packed_by_arm([[maybe_unused]] const std::string& part) {
  bool found = false;
#if defined(__aarch64__)
  for (const Counted& one : kCounted) {
    found = found || (one.calls != 0 && std::string(one.name).find(part) != std::string::npos);
    one.calls = 0;
  }
#endif
  return found;
}

/// A blob whose words are in reverse order.
template <typename Word>
Change reversed(const Blob& blob) {
  std::vector<Word> words(blob.size / sizeof(Word));
  std::memcpy(words.data(), blob.data, blob.size);
  std::reverse(words.begin(), words.end());
  return {blob.key, std::move(words)};
}

struct Running {
  Running(const std::string& name, bool is_float32, std::shared_ptr<PackedStore> packed)
      : is_float32(is_float32),
        cache(BlobCache::open({name + ".ptd"}, BlobCache::Mode::Private, nullptr, std::move(packed))),
        method(Program::load(name + ".pte", cache)->load_method("forward")) {}

  std::vector<float> operator()() const {
    std::vector<float> input(size_t{2} * 64);
    for (size_t i = 0; i < input.size(); ++i) {
      input[i] = static_cast<float>(i % 13) / 8 - 0.75f;
    }
    return numbers(*method->execute({executorch::extension::make_tensor_ptr({2, 64}, input)}).tensor(0));
  }

  /// Turn round the order of weights or biases. @param part of their keys.
  void update(const std::string& part) const {
    std::vector<Change> changes;
    for (size_t i = 0; i < cache->size(); ++i) {
      const Blob& blob = cache->blob(i);
      const bool scale = blob.key.find("scale") != std::string::npos;
      if (blob.key.find('@') == std::string::npos || blob.key.find(part) == std::string::npos || scale) {
        continue;
      }
      const bool of_floats = is_float32 || blob.key.find("bias") != std::string::npos;
      changes.push_back(of_floats ? reversed<float>(blob) : reversed<uint8_t>(blob));
    }
    CHECK(!changes.empty());
    cache->update(changes);
  }

  bool is_float32;
  std::shared_ptr<BlobCache> cache;
  std::shared_ptr<Method> method;
};

#if defined(BLOBSTORE_POSIX_ONLY) || !defined(__linux__)
constexpr bool kLinux = false; // nothing is written in place
#else
constexpr bool kLinux = true;
#endif

struct Kind {
  const char* name;
  bool in_place; // whether updates write the packed weights
  float tolerance; // against torch; rounding for int8 differs
  const char* by; // part of the names of Arm's functions that pack for it
};
constexpr Kind kKinds[] = {
    {"float32", true, 1e-6f, "f32p2vlx1biasf32"},
    {"int8", true, 0.01f, "qsi8cxp"},
    {"static", false, 0.01f, nullptr},
    {"int4", false, 0.01f, "qsi4c"},
    {"int4_groups", false, 0.01f, "qsi4c32p"},
};

/// Every state of the weights gives the outputs that it gives without a store, and only proved maps are used.
void follows(const Kind& kind, const std::string& folder, const std::string& processor) {
  const std::string name = folder + "/" + kind.name;
  const bool is_float32 = std::strcmp(kind.name, "float32") == 0;
  const auto store = PackedStore::open(std::string("packed/") + kind.name);
  (void)packed_by_arm("");
  const Running plain(name, is_float32, nullptr);
  const Running packed(name, is_float32, store);
  const auto before = plain();
  if (!processor.empty() && kind.by != nullptr) {
    CHECK(packed_by_arm(kind.by) == (processor == "sme" || (processor == "dot" && !is_float32)));
  }
  std::vector<float> expected(before.size());
  read(name + ".out").copy(reinterpret_cast<char*>(expected.data()), 4 * expected.size());
  float difference = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    difference = std::max(difference, std::abs(before[i] - expected[i]));
  }
  // QEMU 7.2 gives wrong sums for SMOPA, the instruction of SME for int8
  if (processor != "sme" || is_float32 || std::strncmp(kind.name, "int4", 4) == 0) {
    CHECK(difference <= kind.tolerance);
  }
  CHECK(packed() == before && store->stats().builds == 1 && store->stats().fallbacks == 0);
  const auto files = store->list();
  CHECK(files.size() == 1 && files[0].entries == 2 && (!kLinux || files[0].mapped == (kind.in_place ? 2 : 0)));
  for (const char* part : {"weight", "bias", "0.", ""}) {
    plain.update(part);
    packed.update(part);
    const auto found = packed();
    CHECK(found == plain() && found != before);
  }
  const bool in_place = kLinux && kind.in_place;
  CHECK((store->stats().written != 0) == in_place && (!kLinux || (store->stats().repacked == 0) == in_place));
  packed.cache->revert();
  CHECK(packed() == before);
}

} // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2 || argc == 3);
#if defined(__aarch64__)
  for (const Counted& one : kCounted) {
    one.real = dlsym(RTLD_NEXT, one.name);
    CHECK(one.real != nullptr);
  }
#endif
  std::filesystem::remove_all("packed");
  for (const Kind& kind : kKinds) {
    follows(kind, argv[1], argc == 3 ? argv[2] : "");
  }
}
