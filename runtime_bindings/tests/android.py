"""Compile the library and its face for Java for 64-bit ARM phones with Android 9 or later, and link one library of them.

The package ziglang has clang, a linker and libc++, but nothing of Android. Either of these has the headers:

- a checkout of bionic, Android's C library (`platform/bionic` of the Android Open Source Project). It also lists the symbols
  of each API level, from which the libraries to link with are made here, as those of the NDK are;
- an NDK, or its `sysroot`.

Nothing of it runs here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from runtime_bindings.tests import zig
from tests.helpers.native_build import JAVA, LIBRARY

API = 28
ABI, TRIPLE = "arm64-v8a", "aarch64-linux-android"
PAGE = 16384  # newer phones have such pages, and load only what is aligned to them
# Everything is linked so that nothing is left open.
LINKING = (
    *("-z", "defs", "-z", f"max-page-size={PAGE}"),
    *("--gc-sections", "--strip-all", "--eh-frame-hdr", "--hash-style=gnu"),
)

# How zig's libc++ is set up for a system that it does not know. The namespace is the one of the NDK's.
_LIBCXX = (
    *("ABI_NAMESPACE=__ndk1", "ABI_VERSION=1", "ABI_FORCE_ITANIUM=0", "ABI_FORCE_MICROSOFT=0", "HAS_THREADS=1"),
    *("HAS_THREAD_API_PTHREAD=1", "HAS_THREAD_API_EXTERNAL=0", "HAS_THREAD_API_WIN32=0", "HAS_MONOTONIC_CLOCK=1"),
    *("HAS_FILESYSTEM=1", "HAS_LOCALIZATION=1", "HAS_MUSL_LIBC=0", "HAS_RANDOM_DEVICE=1", "HAS_TERMINAL=1"),
    *("HAS_TIME_ZONE_DATABASE=0", "HAS_UNICODE=1", "HAS_VENDOR_AVAILABILITY_ANNOTATIONS=0", "HAS_WIDE_CHARACTERS=1"),
    *("PSTL_BACKEND_SERIAL=1", "HARDENING_MODE_DEFAULT=_LIBCPP_HARDENING_MODE_NONE"),
    "ASSERTION_SEMANTIC_DEFAULT=_LIBCPP_ASSERTION_SEMANTIC_IGNORE",
)

# What the library takes from others: of C++ from libc++_shared.so or libc++_static.a, of the compiler from its own
# library, and of ExecuTorch from what the application links. All else must be in the C library.
_FROM_OTHERS = re.compile(
    r"_Zn[wa]|_Zd[la]|_ZSt|_ZN[VK]*St|_ZT[IVST](N?St|N?10__cxxabiv1|[a-z]$|P)|__cxa_|__gxx_personality_v0$|_Unwind_|"
    r"__aarch64_|__emutls_get_address$|_ZN[VK]*(10executorch|5torch8executor)|_ZT[IV]N(10executorch|5torch8executor)|et_pal_"
)
# Of the C library all the same, if their names look like those of others
_FROM_LIBC = {"__cxa_atexit", "__cxa_finalize", "__cxa_thread_atexit_impl"}


@dataclass(frozen=True)
class Sysroot:
    """Android's headers, and the libraries to link with."""

    includes: list[str]
    libraries: list[Path]
    begin: Path  # what is linked first into every library


def build(folder: Path, out: Path) -> Path:
    """Compile all sources, and link `libblobstore_jni.so`, which contains the library.

    Args:
        folder: with Android's headers, see above.
        out: where the library goes, in a folder with the name of its ABI.

    Raises:
        SystemExit: The folder has no headers, or a file does not compile or link; says what the compiler says.
    """
    sources = sorted([*(LIBRARY / "src").rglob("*.cpp"), *(JAVA / "native").glob("*.cpp")])
    with tempfile.TemporaryDirectory() as made:
        sysroot = find(folder, Path(made))
        objects = [Path(made) / f"{number}.o" for number in range(len(sources))]
        options = [*target(), *sysroot.includes, *zig.flags(), *jni_header(sysroot), "-Oz"]
        compile_all(sources, objects, options)
        library = out / ABI / "libblobstore_jni.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        link(objects, sysroot, library)
    return library


def compile_all(sources: list[Path], objects: list[Path], options: list[str]) -> None:
    """Compile each source to the object at its place, several at a time.

    Raises:
        SystemExit: One does not compile, or the compiler warns; says what it says.
    """
    hidden = ("-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-ffp-contract=off")

    def compiled(source: Path, to: Path) -> str:
        done, said = zig.run("c++", *options, *hidden, source, "-o", to)
        return said if said or not done else ""  # a warning of the driver itself is none of the compiler's

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if said := [text for text in pool.map(compiled, sources, objects) if text]:
            sys.exit(f"Android:\n{said[0]}")


def target() -> list[str]:
    """The options of the compiler that say what it compiles for."""
    return ["-target", f"{TRIPLE}.{API}", "-nostdinc", "-nostdinc++"]


def find(folder: Path, made: Path) -> Sysroot:
    """What a folder has of Android.

    Args:
        folder: see above.
        made: a folder that stays as long as the result is used, for libraries that are made.

    Raises:
        SystemExit: It has no headers of Android.
    """
    folder = folder.resolve()
    if (folder / "libc" / "libc.map.txt").is_file():
        libcxx = zig.package("ziglang") / "lib"
        clang = f"-isystem{libcxx / 'include'}"
        parts = ("include", "kernel/uapi", "kernel/uapi/asm-arm64", "kernel/android/uapi")
        includes = [f"-D_LIBCPP_{one}" for one in _LIBCXX]
        # not as headers of the system: those of zig come before these, and libc++ wants to be first
        includes += [f"-I{libcxx / name / 'include'}" for name in ("libcxx", "libcxxabi")]
        includes += [clang, *(f"-isystem{folder / 'libc' / part}" for part in parts)]
        libraries = [make_library(folder / name / f"{name}.map.txt", made) for name in ("libc", "libm", "libdl")]
        return Sysroot(includes, libraries, make_begin(made))
    for sysroot in (folder, folder / "sysroot", *folder.glob("toolchains/llvm/prebuilt/*/sysroot")):
        include, of_system = sysroot / "usr" / "include", sysroot / "usr" / "lib" / TRIPLE
        if (include / TRIPLE).is_dir():
            clang = f"-isystem{zig.package('ziglang') / 'lib' / 'include'}"
            includes = [f"-I{include / 'c++' / 'v1'}", clang, f"-isystem{include}", f"-isystem{include / TRIPLE}"]
            libraries = [of_system / str(API) / f"{name}.so" for name in ("libc", "libm", "libdl")]
            libraries.append(of_system / "libc++_shared.so")
            return Sysroot(includes, libraries, of_system / str(API) / "crtbegin_so.o")
    sys.exit(
        f"{folder}: neither a checkout of bionic, with libc/libc.map.txt, nor an NDK or its sysroot, with usr/include/{TRIPLE}"
    )


def symbols(text: str) -> Iterator[tuple[str, bool]]:
    """What a library of bionic exports to applications on 64-bit ARM at the API level here.

    Args:
        text: the list of its symbols, `NAME.map.txt`. A comment behind a symbol or the beginning of a version says where it
            is: `introduced=30`, `arm x86`, `llndk`, `var`.

    Yields:
        A name, and whether it is a variable.
    """
    inherited: list[str] = []
    hidden = local = False
    for line in text.splitlines():
        code, _, comment = line.partition("#")
        tags = comment.split()
        if begin := re.match(r"\s*(\w+)\s*\{", code):
            inherited, hidden, local = tags, begin[1].endswith(("PRIVATE", "PLATFORM")), False
        elif re.match(r"\s*(global|local):", code):
            local = "local" in code
        elif (name := re.match(r"\s*(\w+);", code)) and not hidden and not local:
            own = {tag.partition("=")[0]: tag.partition("=")[2] for tag in [*inherited, *tags]}
            machines = own.keys() & {"arm", "arm64", "x86", "x86_64", "riscv64"}
            first = own.get("introduced-arm64") or own.get("introduced") or "1"
            internal = own.keys() & {"llndk", "apex", "systemapi", "platform-only", "future"}
            if (not machines or "arm64" in machines) and not internal and int(first) <= API:
                yield name[1], "var" in own


def make_library(listed: Path, folder: Path) -> Path:
    """A library that exports the symbols of a list and has no code, as those that the NDK links with."""
    name = listed.name.removesuffix(".map.txt")
    lines = [".text"]
    for symbol, is_variable in symbols(listed.read_text(encoding="utf-8")):
        lines += [
            f".globl {symbol}",
            f".type {symbol}, %{'object' if is_variable else 'function'}",
            f"{symbol}: .quad 0",
        ]
    library = folder / f"{name}.so"
    compiled = assembled(folder / f"{name}.s", "\n".join(lines) + "\n")
    must("ld.lld", "-shared", "-soname", library.name, compiled, "-o", library)
    return library


def make_begin(folder: Path) -> Path:
    """What the NDK's crtbegin_so.o has that the library uses, without code."""
    lines = [".data"]
    for symbol in ("__dso_handle", "atexit"):
        lines += [f".hidden {symbol}", f".globl {symbol}", f"{symbol}: .quad 0"]
    return assembled(folder / "begin.s", "\n".join(lines) + "\n")


def assembled(source: Path, text: str) -> Path:
    """Write assembly, and make an object of it beside it."""
    source.write_text(text, encoding="utf-8")
    compiled = source.with_suffix(".o")
    must("c++", *target(), "-c", source, "-o", compiled)
    return compiled


def link(objects: list[Path], sysroot: Sysroot, library: Path) -> None:
    """Link the library, and see that all that it lacks is where it will be on a phone."""
    options = ["-shared", "-soname", library.name, *LINKING, "--icf=safe", "--no-demangle", "--warn-unresolved-symbols"]
    options += [f"--version-script={JAVA / 'exported.txt'}"]
    said = must("ld.lld", *options, sysroot.begin, *objects, *sysroot.libraries, "-o", library)
    if lost := unknown(re.findall(r"undefined symbol: (\S+)", said)):
        library.unlink()
        sys.exit(f"{library}: nothing of API {API} has {', '.join(lost)}")


def unknown(undefined: list[str]) -> list[str]:
    """Which of these symbols neither C++, nor the compiler, nor ExecuTorch has."""
    return sorted(name for name in {*undefined} if name in _FROM_LIBC or not _FROM_OTHERS.match(name))


def jni_header(sysroot: Sysroot) -> list[str]:
    """The options for jni.h, which bionic does not have: for that of the JDK that is installed here."""
    if any(Path(one.removeprefix("-isystem"), "jni.h").is_file() for one in sysroot.includes):
        return []
    javac = shutil.which("javac")
    if javac is None:
        sys.exit("jni.h is missing: bionic has none, and there is no JDK")
    include = Path(javac).resolve().parents[1] / "include"
    return [f"-isystem{include}", f"-isystem{include / 'linux'}"]


def must(*command: object) -> str:
    """Run zig; what it says. Ends the process if it fails."""
    done, said = zig.run(*command)
    return said if done else sys.exit(f"Android:\n{said}")
