"""Bytes of the native library and of an application on it, as the commands on docs/platforms.md build them, stripped:
`python -m benchmarks sizes --page docs/platforms.md`, a quarter of an hour.

The application is `examples/cpp/device.cpp`, which uses caches, programs, adapters, training and saving. The smallest one is
`with_cache.cpp`, which runs a program and changes a weight by its name. Compilers that
this machine does not have are left out; for aarch64, the wheel of ExecuTorch is fetched once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Row
from tests.helpers import machines, native_build
from tests.helpers.native_build import ALONE, LIBRARY, MOST_BYTES, SMALLEST, stripped

TITLE = "Sizes in bytes"

SECTIONS = {
    "code": r"\.text|\.plt.*|\.init|\.fini",
    "tables for exceptions": r"\.eh_frame.*|\.gcc_except_table",
    "names, symbols and relocations": r"\.dyn.*|\.rela.*|\.gnu\.(?!build).*|\.hash|\.symtab|\.strtab",
    "constants": r"\.rodata.*|\.data\.rel\.ro.*",
}
"""What the lines of the table add up, by patterns of section names."""


@dataclass(frozen=True)
class Tools:
    """A compiler and a linker.

    Attributes:
        name: for people.
        options: of CMake.
        strip: the command.
        most: bytes that the shared library may have as `MinSizeRel`; 0 for any number.
        machine: that it compiles for, if that is not this one.
    """

    name: str
    options: tuple[str, ...] = ()
    strip: str = "strip"
    most: int = 0
    machine: str = ""


CLANG = (f"-DCMAKE_CXX_COMPILER={shutil.which('clang++')}", "-DCMAKE_LINKER_TYPE=LLD")
TOOLS = (
    Tools("GCC, GNU ld", most=MOST_BYTES["x86_64, GCC"]),
    Tools("Clang, LLVM's linker", CLANG),
    Tools(
        "aarch64, Clang, LLVM's linker",
        (f"-DCMAKE_TOOLCHAIN_FILE={LIBRARY / 'cmake' / 'aarch64-linux-gnu-clang.cmake'}",),
        "aarch64-linux-gnu-strip",
        MOST_BYTES["aarch64, Clang"],
        "aarch64",
    ),
)


def rows(folder: Path) -> Iterator[Row]:
    """Build everything with each compiler, and measure it."""
    if reason := native_build.missing():
        raise SystemExit(reason)
    for tools in TOOLS:
        if "Clang" in tools.name and not (shutil.which("clang++") and shutil.which("ld.lld")):
            continue
        if shutil.which(tools.strip):
            yield from _rows_of(tools, folder / re.sub(r"\W+", "-", tools.name))


def _rows_of(tools: Tools, folder: Path) -> Iterator[Row]:
    options = list(tools.options)
    if tools.machine:
        options.append(f"-Dexecutorch_DIR={machines.executorch(tools.machine, '3.11') / 'share' / 'cmake'}")
    for kind in ("MinSizeRel", "Release") if tools is TOOLS[0] else ("MinSizeRel",):
        place = folder / kind
        build = [*options, f"-DCMAKE_BUILD_TYPE={kind}"]
        native_build.build(LIBRARY, place / "library", *build)
        native_build.run("cmake", "--install", place / "library", "--prefix", place / "prefix")
        [library] = [path for path in (place / "prefix").rglob("libblobstore_runtime.so*") if not path.is_symlink()]
        (place / "stripped").mkdir()
        library = stripped(library, place / "stripped", tools.strip)
        most = tools.most if kind == "MinSizeRel" else 0
        found = library.stat().st_size
        yield Row(
            f"{tools.name}, `{kind}`: the shared library",
            f"{found:,}",
            f"at most {most:,}" if most else "",
            not most or found <= most,
        )
        if kind == "MinSizeRel":
            yield from (Row(f"  {name}", f"{size:,}", "", True) for name, size in _parts(library).items())
            [alone] = (place / "prefix").rglob("libblobstore_backend.so")
            size, most = stripped(alone, place / "stripped", tools.strip).stat().st_size, MOST_BYTES[ALONE]
            yield Row(f"  {ALONE}, libblobstore_backend.so", f"{size:,}", f"at most {most:,}", size <= most)
        native_build.build(
            Path(__file__).parent / "size_of_apps", place / "apps", *build, f"-DCMAKE_PREFIX_PATH={place / 'prefix'}"
        )
        sizes = {
            name: stripped(place / "apps" / name, place / "stripped", tools.strip).stat().st_size
            for name in ("static", "static_drop_unused", "shared")
        }
        yield Row("  an application, static", f"{sizes['static']:,}", "", True)
        small = sizes["static_drop_unused"]
        yield Row("  … with `blobstore::drop_unused`", f"{small:,}", "", small < sizes["static"])
        yield Row("  … shared, without the library", f"{sizes['shared']:,}", "", True)
        if tools is TOOLS[0] and kind == "MinSizeRel":
            yield from _smallest(place, build)


def _smallest(place: Path, build: list[str]) -> Iterator[Row]:
    """The smallest application on the whole library and on a minimal one, and what is in the latter."""
    yield Row(
        "  the smallest application",
        f"{stripped(place / 'apps' / 'smallest', place / 'stripped').stat().st_size:,}",
        "",
        True,
    )
    minimal = place / "minimal"
    native_build.build(LIBRARY, minimal / "library", *build, "-DBLOBSTORE_MINIMAL=ON", "-DBLOBSTORE_SHARED=OFF")
    native_build.run("cmake", "--install", minimal / "library", "--prefix", minimal / "prefix")
    options = (*build, "-DSMALLEST=ON", f"-DCMAKE_PREFIX_PATH={minimal / 'prefix'}")
    native_build.build(Path(__file__).parent / "size_of_apps", minimal / "apps", *options)
    found = stripped(minimal / "apps" / "smallest", minimal).stat().st_size
    most = MOST_BYTES[SMALLEST]
    yield Row("  … with `BLOBSTORE_MINIMAL`", f"{found:,}", f"at most {most:,}", found <= most)
    for room, size in sorted(_rooms(minimal / "apps" / "smallest.map").items(), key=lambda item: -item[1]):
        yield Row(f"    of `src/{room}`", f"{size:,}", "", True)


def _rooms(linked: Path) -> dict[str, int]:
    """The bytes that each folder of the library's sources has in an application, by the linker's map."""
    left_out = ("adapters", "codec", "releases", "requests", "training")
    homes = {
        f"{path.name}.o": path.parent.name
        for path in (LIBRARY / "src").glob("*/*.cpp")
        if path.parent.name not in left_out
    }
    _, _, text = linked.read_text(encoding="utf-8").partition("Linker script and memory map")
    kept = r"^ \.(?:text|rodata|eh_frame|gcc_except_table|data)\S*\s+0x\w+\s+(0x\w+) \S+\((\S+)\)$"
    sizes: dict[str, int] = {}
    for size, member in re.findall(kept, text, re.MULTILINE):
        if room := homes.get(member):
            sizes[room] = sizes.get(room, 0) + int(size, 16)
    return sizes


def _parts(path: Path) -> dict[str, int]:
    """The bytes of the sections of a file, added up."""
    command = ["readelf", "-SW", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^ +\[ *\d+\] (\S+) +(?!NOBITS)\S+ +[0-9a-f]+ [0-9a-f]+ ([0-9a-f]+)", text, re.MULTILINE)
    sizes = dict.fromkeys(SECTIONS, 0)
    for name, size in found:
        for part, pattern in SECTIONS.items():
            if re.fullmatch(pattern, name):
                sizes[part] += int(size, 16)
                break
    return sizes
