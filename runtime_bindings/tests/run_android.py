"""Run the library on Android's own C library and linker, and on a vendor's prebuilt ExecuTorch, under qemu.

    python -m runtime_bindings.tests.run_android BIONIC [VENDOR]

Three things are compiled for 64-bit ARM and run: the C++ example of a device's life, a stock application with nothing of
blobstore but `libblobstore_backend.so`, and that library. What they compute is compared with eager PyTorch here.

BIONIC holds Android's headers, as `android.py` says, and in `device/` the files `linker64`, `libc.so`, `libdl.so` and
`libm.so` of a phone or an emulator image, with Android 8 or later. VENDOR holds `libexecutorch.so` for arm64-v8a and
`include/executorch`; without it, the package `react-native-executorch` is fetched from npm, which has both.

What this is not: a phone's kernel (system calls are this machine's), and ART, Android's runtime for Java.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from blobstore.runtime import BlobCache
from runtime_bindings.tests import android, zig
from runtime_bindings.tests.platforms import say
from tests.helpers.native_build import LIBRARY, ROOT
from tests.lowering.live import lower_through, seeded

VENDORS = "react-native-executorch@0.9.3"
OF_DEVICE = ("linker64", "libc.so", "libdl.so", "libm.so")
OUT = ROOT / "build" / "android"
# What neither the example nor the stock application uses
WITHOUT = ("releases/", "requests/", "codec/", "facade/releases", "facade/requests", "facade/runtime")

# The beginning of an application, as the NDK's crtbegin_dynamic.o has it
BEGIN = """
.text
.globl _start
_start: mov x29, xzr
 mov x30, xzr
 mov x0, sp
 mov x1, xzr
 adrp x2, main
 add x2, x2, :lo12:main
 adrp x3, .Lnone
 add x3, x3, :lo12:.Lnone
 b __libc_init
"""
# Of every library and application: what identifies it when it ends
IDENTITY = """
.data
.balign 8
.Lnone: .quad 0, 0, 0
.hidden __dso_handle
.globl __dso_handle
__dso_handle: .quad __dso_handle
.text
.hidden atexit
.globl atexit
atexit: mov x1, xzr
 adrp x2, __dso_handle
 add x2, x2, :lo12:__dso_handle
 b __cxa_atexit
"""
# Functions of API 28, for a C library that is older
NEWER = {
    "aligned_alloc": """void* aligned_alloc(size_t alignment, size_t size) {
  void* memory = 0;
  return posix_memalign(&memory, alignment < sizeof memory ? sizeof memory : alignment, size) ? 0 : memory;
}""",
    "getentropy": """int getentropy(void* buffer, size_t size) {
  return syscall(__NR_getrandom, buffer, size, 0) == (long)size ? 0 : -1;
}""",
}


@dataclass(frozen=True)
class Symbols:
    """Of a library: what it has, what it lacks, the libraries that it asks for, and the name by which others ask for it."""

    defined: frozenset[str]
    undefined: frozenset[str]
    needed: tuple[str, ...]
    name: str

    @classmethod
    def of(cls, library: Path) -> Symbols:
        text = subprocess.run(
            ["readelf", "--dyn-syms", "--dynamic", "--wide", str(library)], check=True, capture_output=True, text=True
        ).stdout
        found = re.findall(r"^ +\d+: \w+ +\d+ \w+ +\w+ +\w+ +(\w+) ([^\s@]+)", text, re.MULTILINE)
        return cls(
            frozenset(name for section, name in found if section != "UND"),
            frozenset(name for section, name in found if section == "UND"),
            tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", text)),
            next(iter(re.findall(r"\(SONAME\).*\[(.*)\]", text)), library.name),
        )


def main(bionic: str = "", vendor: str = "") -> None:
    device = Path(bionic) / "device"
    if not bionic or not all((device / name).is_file() for name in OF_DEVICE):
        sys.exit(f"{__doc__}\n{device if bionic else 'BIONIC'}: {', '.join(OF_DEVICE)} are not there")
    if shutil.which("qemu-aarch64-static") is None:
        sys.exit("qemu-aarch64-static is missing: Debian's package qemu-user-static has it")
    theirs = Path(vendor).resolve() if vendor else fetch()
    made = OUT / "run"
    shutil.rmtree(made / "root", ignore_errors=True)
    phone = Phone(made / "root", device, theirs)
    build(Path(bionic), theirs, made, phone)
    check_device(phone)
    check_stock_application(phone)


def fetch() -> Path:
    """The vendor's ExecuTorch from npm, unpacked; the folder that has it."""
    folder = OUT / "vendor"
    if not (folder / "libexecutorch.so").exists():
        if shutil.which("npm") is None:
            sys.exit(f"npm, which would fetch {VENDORS}, is missing: name a VENDOR")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", VENDORS]
        packed = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()[-1]
        with tarfile.open(folder / packed) as opened:
            opened.extractall(folder, filter="data")
        (folder / "include").symlink_to("package/third-party/include")
        # last, because it says that all is there
        (folder / "libexecutorch.so").symlink_to(
            "package/third-party/android/libs/executorch/arm64-v8a/libexecutorch.so"
        )
    say(f"ExecuTorch of {VENDORS}, from npm")
    return folder


class Phone:
    """A folder that qemu takes for the root of a phone's file system, with Android's linker and libraries."""

    def __init__(self, root: Path, device: Path, vendor: Path) -> None:
        self.root = root
        self.system = root / "system" / "lib64"
        self.application = root / "data" / "local" / "tmp"
        self.application.mkdir(parents=True)
        (root / "system" / "bin").mkdir(parents=True)
        self.system.mkdir()
        shutil.copy(device / "linker64", root / "system" / "bin")
        for name in OF_DEVICE[1:]:
            shutil.copy(device / name, self.system)
        library = vendor / "libexecutorch.so"
        self.executorch = self.application / Symbols.of(library).name  # "libexecutorch_jni.so"
        shutil.copy(library, self.executorch)
        (root / "system" / "bin" / "linker64").chmod(0o755)

    def run(self, *command: object) -> list[str]:
        """Run an application; the lines that it prints.

        Raises:
            SystemExit: It ended with an error.
        """
        emulator = ["qemu-aarch64-static", "-L", str(self.root), "-E", f"LD_LIBRARY_PATH={self.application}"]
        done = subprocess.run([*emulator, *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.splitlines()


def build(bionic: Path, vendor: Path, made: Path, phone: Phone) -> None:
    """Compile everything, and link it so that nothing is left open."""
    sysroot = android.find(bionic, made)
    # atomic operations as instructions, which qemu has, since zig has no library with the functions for them
    target = [*android.target(), "-mcpu=generic+lse"]
    options = [*target, *sysroot.includes, *zig.flags(vendor / "include"), "-O1"]
    sources = [
        path
        for path in sorted((LIBRARY / "src").rglob("*.cpp"))
        if not path.relative_to(LIBRARY / "src").as_posix().startswith(WITHOUT)
    ]
    backend = LIBRARY / "src" / "facade" / "backend.cpp"
    applications = [
        ROOT / "examples" / "cpp" / "device.cpp",
        ROOT / "tests" / "runtime" / "plugin" / "stock_client.cpp",
    ]
    objects = {source: made / f"{number}.o" for number, source in enumerate([*sources, *applications])}
    android.compile_all(list(objects), list(objects.values()), options)
    say(f"{len(objects)} files compiled for {android.TRIPLE}{android.API}")
    runtime = [*compilers(made, options), android.assembled(made / "identity.s", IDENTITY), newer(made, options, phone)]
    libraries = [phone.executorch, *sysroot.libraries, *stubs(made, phone)]
    library = [objects[source] for source in sources if source != backend]
    shared = ["-shared", "-soname", "libblobstore_backend.so"]
    shared.append(f"--version-script={LIBRARY / 'cmake' / 'exported_backend.txt'}")
    linked(phone.application / "libblobstore_backend.so", shared, [objects[backend], *library], runtime, libraries)
    begin = android.assembled(made / "begin.s", BEGIN + IDENTITY)
    for source, own in zip(applications, ([*library], []), strict=True):
        linked(
            phone.application / source.stem,
            ["-pie", "-dynamic-linker", "/system/bin/linker64", "--allow-shlib-undefined"],
            [begin, objects[source], *own],
            [one for one in runtime if one.name != "identity.o"],
            libraries,
        )


def linked(target: Path, options: list[str], objects: list[Path], runtime: list[Path], libraries: list[Path]) -> None:
    android.must("ld.lld", *options, *android.LINKING, *objects, *runtime, *libraries, "-o", target)
    say(f"{target.name}: linked, nothing open, {target.stat().st_size:,} bytes")


def compilers(made: Path, options: list[str]) -> list[Path]:
    """What the NDK links into everything: LLVM's libunwind, and the part of libc++ that is newer than the vendor's."""
    library = zig.package("ziglang") / "lib"
    source = library / "libunwind"
    own = [one for one in options if one not in ("-Wall", "-Wextra", "-Werror", "-std=c++17")]
    own += [f"-I{source / 'include'}", "-D_LIBUNWIND_HIDE_SYMBOLS", "-funwind-tables", "-fvisibility=hidden", "-w"]
    names = ("libunwind.cpp", "UnwindLevel1.c", "UnwindRegistersRestore.S", "UnwindRegistersSave.S")
    compiled = []
    for path in (*(source / "src" / name for name in names), library / "libcxx" / "src" / "functional.cpp"):
        special = ["-std=c++23", "-D_LIBCPP_BUILDING_LIBRARY"] if path.name == "functional.cpp" else []
        compiled.append(made / f"compiler-{path.name}.o")
        android.must("c++" if path.suffix == ".cpp" else "cc", *own, *special, path, "-o", compiled[-1])
    return compiled


def newer(made: Path, options: list[str], phone: Phone) -> Path:
    """The functions of API 28 that the C library at hand lacks."""
    lacking = NEWER.keys() - Symbols.of(phone.system / "libc.so").defined
    source = made / "newer.c"
    begin = "#include <stdlib.h>\n#include <sys/syscall.h>\n#include <unistd.h>\n"
    source.write_text(begin + "\n".join(NEWER[name] for name in sorted(lacking)) + "\n", encoding="utf-8")
    say(f"the C library of the device lacks {', '.join(sorted(lacking)) or 'nothing'} of API {android.API}")
    own = [one for one in options if one != "-std=c++17"]
    android.must("cc", *own, "-w", "-fvisibility=hidden", source, "-o", made / "newer.o")
    return made / "newer.o"


def stubs(made: Path, phone: Phone) -> list[Path]:
    """Libraries in place of those of a phone that the vendor's asks for and nobody calls here, for logs and for Java."""
    vendor = Symbols.of(phone.executorch)
    lacking = set(vendor.undefined)
    for name in OF_DEVICE[1:]:
        lacking -= Symbols.of(phone.system / name).defined
    lacking -= Symbols.of(phone.root / "system" / "bin" / "linker64").defined
    for name in vendor.needed:
        if not (phone.system / name).exists():
            lines = "".join(f".globl {symbol}\n{symbol}:\n" for symbol in sorted(lacking))
            compiled = android.assembled(made / f"{name}.s", f".text\n{lines} mov x0, xzr\n ret\n")
            android.must("ld.lld", "-shared", "-soname", name, compiled, "-o", phone.application / name)
            say(f"{name}: {len(lacking)} functions that do nothing")
            lacking = set()
    return [phone.application / name for name in vendor.needed if (phone.application / name).exists()]


def check_device(phone: Phone) -> None:
    """The life of a device, `examples/cpp`: its own accuracies say what is right, as in tests/runtime/test_cpp_example.py."""
    files = OUT / "device-files"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    arguments, sys.argv = sys.argv, ["prepare.py", str(files)]
    runpy.run_path(str(ROOT / "examples" / "cpp" / "prepare.py"), run_name="__main__")
    sys.argv = arguments
    lines = phone.run(phone.application / "device", files)
    say("\n".join(lines))
    scores = {line[:38].strip(): int(line.split()[-3]) for line in lines}
    right = (
        scores["adapter left.ptd"] > 900
        and scores["head.bias changed"] < 600
        and scores["adapter up.ptd"] > 900
        and scores["published"] > 900 > scores["trained, not published"]
        and scores["started again from trained.ptd"] == scores["published"] > scores["reverted"]
    )
    if not right:
        sys.exit("the accuracies are wrong")


def check_stock_application(phone: Phone) -> None:
    """ExecuTorch's Module runs a live program after one dlopen, and follows; eager PyTorch computes the same."""
    x = torch.ones(1, 8)
    nets = [
        seeded(lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), seed)
        for seed in range(2)
    ]
    files = OUT / "stock-files"
    program = lower_through({"forward": (nets[0], (x,))}, files)
    data, delta, live = (files / f"{name}.ptd" for name in ("model", "tuned", "live"))
    cache = BlobCache(data)
    cache.update_state_dict(nets[1].state_dict())
    cache.save(delta, dirty_only=True)
    library = phone.application / "libblobstore_backend.so"
    lines = phone.run(
        *(phone.application / "stock_client", "load", library, "open", data, "module", program, data, "run"),
        *("update", delta, "run", "revert", "run", "close"),
        *("copy", data, live, "share", live, "module", program, live, "run", "commit", live, delta, "run"),
    )
    say("\n".join(lines))
    found = [np.array(line.split(), np.float32) for line in lines if re.match(r"-?\d.* ", line)]
    with torch.no_grad():
        before, after = (net(x)[0].numpy() for net in nets)
    expected = [before, after, before, before, after]
    if len(found) != len(expected) or not np.allclose(found, expected, atol=1e-5):
        sys.exit(f"eager PyTorch computes {before} and {after}")
    say("ran: the same as eager PyTorch, before and after updates")


if __name__ == "__main__":
    main(*sys.argv[1:])
