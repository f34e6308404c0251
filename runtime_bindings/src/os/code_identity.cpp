#include "os/code_identity.h"

#include <cstdint>
#include <cstdio>
#include <cstring>

#include <sys/stat.h>
#include <sys/utsname.h>

#include "os/platform.h"
#include "os/system_text.h"

#if BLOBSTORE_LINUX
#include <link.h>
#include <sys/auxv.h>
#else
#include <dlfcn.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace blobstore::internal {
namespace {

#if BLOBSTORE_LINUX
struct Search {
  uintptr_t address;
  std::string build_id;
  std::string path;
};

/// The build id in a segment of notes; see "Note Section" in the ELF specification.
std::string build_id_in(const uint8_t* notes, size_t size) {
  while (size >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    std::memcpy(&note, notes, sizeof note);
    const size_t name = (size_t{note.n_namesz} + 3) / 4 * 4;
    const size_t content = (size_t{note.n_descsz} + 3) / 4 * 4;
    if (name > size - sizeof note || content > size - sizeof note - name) {
      return {};
    }
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 && std::memcmp(notes + sizeof note, "GNU", 4) == 0) {
      return {reinterpret_cast<const char*>(notes + sizeof note + name), note.n_descsz};
    }
    notes += sizeof note + name + content;
    size -= sizeof note + name + content;
  }
  return {};
}

int look_at_object(dl_phdr_info* object, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  bool holds = false;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const ElfW(Phdr) & part = object->dlpi_phdr[i];
    const uintptr_t begin = object->dlpi_addr + part.p_vaddr;
    holds = holds || (part.p_type == PT_LOAD && search.address >= begin && search.address - begin < part.p_memsz);
  }
  for (int i = 0; holds && i < object->dlpi_phnum && search.build_id.empty(); ++i) {
    const ElfW(Phdr) & part = object->dlpi_phdr[i];
    if (part.p_type == PT_NOTE) {
      search.build_id = build_id_in(reinterpret_cast<const uint8_t*>(object->dlpi_addr + part.p_vaddr), part.p_memsz);
    }
  }
  if (holds) {
    search.path = object->dlpi_name != nullptr && *object->dlpi_name != '\0' ? object->dlpi_name : "/proc/self/exe";
  }
  return holds ? 1 : 0;
}
#endif

#if defined(__x86_64__)
/// @param most the highest leaf that there is; asked once, because each question leaves a virtual machine.
std::string leaf(unsigned most, unsigned number, unsigned part, bool with_ebx) {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (number <= most) {
    __cpuid_count(number, part, eax, ebx, ecx, edx);
  }
  char text[40];
  std::snprintf(text, sizeof text, "%08x%08x%08x%08x", eax, with_ebx ? ebx : 0, ecx, edx);
  return text;
}
#endif

std::string find_processor_kind() {
  std::string kind;
  utsname system{};
  if (uname(&system) == 0) {
    kind = system.machine;
  }
#if defined(__x86_64__)
  // ebx of leaf 1 tells the core that the thread runs on
  const unsigned most = __get_cpuid_max(0, nullptr);
  kind += " " + leaf(most, 1, 0, false) + " " + leaf(most, 7, 0, true) + " " + leaf(most, 7, 1, true);
#elif BLOBSTORE_LINUX
  char features[40];
  std::snprintf(features, sizeof features, " %lx %lx", getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
  kind += features;
  for (int core = 0;; ++core) { // libraries choose by the model of the cores, too
    const std::string model =
        system_text("/sys/devices/system/cpu/cpu" + std::to_string(core) + "/regs/identification/midr_el1");
    if (model.empty()) {
      break;
    }
    kind += " " + model.substr(0, model.find('\n'));
  }
#endif
  return kind;
}

} // namespace

std::string build_of(const void* address) {
  std::string path;
#if BLOBSTORE_LINUX
  Search search{reinterpret_cast<uintptr_t>(address), {}, {}};
  dl_iterate_phdr(&look_at_object, &search);
  if (!search.build_id.empty()) {
    return search.build_id;
  }
  path = search.path;
#else
  Dl_info info;
  path = dladdr(address, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
#endif
  struct stat status;
  if (path.empty() || stat(path.c_str(), &status) != 0) {
    return {};
  }
  return std::to_string(status.st_size) + ":" + std::to_string(status.st_mtime);
}

const std::string& processor_kind() {
  static const auto* kind = new std::string(find_processor_kind());
  return *kind;
}

} // namespace blobstore::internal
